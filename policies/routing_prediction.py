"""When a request would get its first token, if it went to a certain replica now."""

from __future__ import annotations

from collections.abc import Sequence

from policies.cost import Coefficients
from policies.routing import Cached, Candidate, Prediction, RouteRequest

_Cut = tuple[int, int, int, int, int, int]
"""A way to divide a prompt: tokens to compute, in so many steps, with so much attended and context
read (as in `cost.StepShape`); tokens to load to the device, and of these from Redis."""

_PASSES = 4
"""The longer a queue is, the more comes that overtakes, which makes it longer: each pass counts
what comes in the time that the one before has found. More of them change little."""


def predict(request: RouteRequest, candidate: Candidate) -> Prediction:
    """The time to first token if the request went there now.

    Steps: the engine decodes in every step, and prefills with what is left of the step's tokens. A
    step costs its constant and a row for each running sequence, and then what it prefills.

    `queue_s`: half of the step under way; then the steps until the pending tokens that are not in
    it are computed and a slot is free, whichever takes more of them, since both go on in the same
    steps. Those who run are taken to be spread evenly over their answers (`answer_tokens`; where
    that is not known, the request's own `max_tokens`), so that of n slots the k-th comes free after
    `k / (n + 1)` of an answer's steps. Pending tokens attend as cold prompts of equal length would.

    Who is in front: whoever is more urgent, and what is queued of the request's own flow. Another
    flow of its priority gets, until the request's turn comes, no more than its weight allows: of
    `weight_j` it computes at most `weight_j / weight` of what the own flow does, and no more than
    it has and what comes of it by then, if it goes on as lately. So much is in front, in tokens and
    in sequences. Of the request itself half counts to what the own flow does: its flow may be
    served next, or may just have been. What is less urgent is overtaken, and gives up its slots.

    `load_s` and `prefill_s`: what lies in lower tiers is loaded as far as loading and computing the
    rest alone takes least time, which is how the engine decides (`tiering.choose_load`), of each
    tier all or nothing. The last token of a prompt is computed wherever it lies.
    """
    return Prediction(*predicted_terms(request, (candidate,))[0])


def predicted_terms(
    request: RouteRequest, candidates: Sequence[Candidate]
) -> list[tuple[float, float, float]]:
    """`predict` for every candidate, as plain tuples.

    One loop without calls, as most of a decision's time goes here. How a prompt can be divided is
    worked out once for all candidates that have the same of it, what that costs once for
    neighbours with the same (not merely equal) coefficients.
    """
    prompt_tokens, priority = request.prompt_tokens, request.priority
    flow, weight = request.flow, request.weight
    cuts_of: dict[tuple[int, Cached], list[_Cut]] = {}
    cuts: list[_Cut] = []
    further_cuts: list[_Cut] = []
    cut_tokens = 0  # of a step, that `cuts` are for
    known_cost: Coefficients | None = None
    known_cached: Cached | None = None
    terms: list[tuple[float, float, float]] = []
    pending: float
    waiting: float
    for _, cost, standing, cached in candidates:
        if cost is not known_cost or cached is not known_cached:
            (
                constant_s,
                token_s,
                sequence_s,
                attended_s,
                read_s,
                dram_latency_s,
                dram_block_s,
                redis_latency_s,
                redis_block_s,
                step_tokens,
                block_tokens,
            ) = known_cost = cost
            if cached is not known_cached or step_tokens != cut_tokens:
                known_cached, cut_tokens = cached, step_tokens
                known_cuts = cuts_of.get((step_tokens, cached))
                if known_cuts is None:
                    known_cuts = _cuts(prompt_tokens, step_tokens, cached)
                    cuts_of[step_tokens, cached] = known_cuts
                cuts, further_cuts = known_cuts, known_cuts[1:]
            own_step_s = constant_s + sequence_s
            uncached_tokens, steps, attended, context_read, _, _ = cuts[0]  # which loads nothing
            tokens_s = token_s * uncached_tokens + attended_s * attended + read_s * context_read
            load_s = 0.0
            least_s = alone_prefill_s = tokens_s + steps * own_step_s
            for tokens, steps, attended, context_read, to_device, from_redis in further_cuts:
                moving_s = 0.0
                if from_redis:
                    moving_s = redis_latency_s + redis_block_s * (from_redis / block_tokens)
                if to_device:
                    moving_s += dram_latency_s + dram_block_s * (to_device / block_tokens)
                rows_s = token_s * tokens + attended_s * attended + read_s * context_read
                alone_s = moving_s + rows_s + steps * own_step_s
                if alone_s < least_s:
                    least_s, uncached_tokens = alone_s, tokens
                    tokens_s, load_s, alone_prefill_s = rows_s, moving_s, alone_s - moving_s

        if not (standing[0] or standing[1] or standing[2]):  # idle
            terms.append((0.0, load_s, alone_prefill_s))
            continue
        row_s = token_s + sequence_s
        context_s = attended_s + read_s
        _, _, running, context, slots, _, queued, answer_tokens, _, yielding = standing
        room = step_tokens - running
        if room < 1:
            room = 1
        step_s = own_step_s + running * row_s + context * context_s
        queue_s = 0.0
        for _ in range(_PASSES):
            come_s = queue_s  # for which others' requests come that count as well
            pending, waiting = standing[0], standing[1]
            more_may_come = False
            if queued and (len(queued) > 1 or queued[0][3] != flow or queued[0][0] != priority):
                own_tokens, own_sequences = 0.5 * uncached_tokens, 0.5
                for its_priority, sequences, tokens, its_flow, _, _ in queued:
                    if its_priority == priority and its_flow == flow:
                        own_tokens += tokens
                        own_sequences += sequences
                for its_priority, sequences, tokens, its_flow, its_weight, per_s in queued:
                    if its_priority > priority:
                        pending -= tokens
                        waiting -= sequences
                    elif its_priority == priority and its_flow != flow:
                        share = its_weight / weight
                        come = per_s * come_s
                        further = own_tokens * share - tokens
                        pending += further if further < come else come
                        more_may_come |= further > 0 < per_s
                        come *= sequences / (tokens or 1)
                        further = own_sequences * share - sequences
                        waiting += further if further < come else come
            queue_s = 0.5 * step_s
            steps_ahead = 0.0
            if pending > 0:
                under_way = pending if pending < room else room
                queue_s += 0.5 * under_way * token_s
                behind = pending - under_way
                if behind:
                    steps_ahead = behind / room
                    queue_s += behind * (token_s + attended_s * pending / (2 * (waiting or 1)))
            slots_short = running + waiting + 1 - slots
            if slots_short > 0 and yielding:
                for its_priority, sequences in yielding:
                    if its_priority > priority:
                        slots_short -= sequences
            if slots_short > 0:
                until_free = slots_short * (answer_tokens or request.max_tokens) / (slots + 1)
                if until_free > steps_ahead:
                    steps_ahead = until_free
            queue_s += steps_ahead * step_s
            if not more_may_come:
                break
        steps = (uncached_tokens - 1) // room + 1
        terms.append((queue_s, load_s, tokens_s + steps * step_s))
    return terms


def _cuts(prompt_tokens: int, step_tokens: int, cached: Cached) -> list[_Cut]:
    """Load nothing; what is in host memory; what is in Redis too, which lies behind that and comes
    through host memory."""
    device, dram, redis = cached
    loads = [(0, 0)]
    if dram:
        loads.append((dram, 0))
    if redis:
        loads.append((dram + redis, redis))
    cuts: list[_Cut] = []
    for to_device, from_redis in loads:
        uncached = max(1, prompt_tokens - device - to_device)
        context = prompt_tokens - uncached
        full = (uncached - 1) // step_tokens  # steps before the last
        cuts.append(
            (
                uncached,
                full + 1,
                uncached * context + uncached * (uncached + 1) // 2,
                (full + 1) * context + step_tokens * full * (full + 1) // 2 + uncached,
                to_device,
                from_redis,
            )
        )
    return cuts
