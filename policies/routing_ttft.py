"""The policy that decides by predicted time to first token."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from policies.cost import Coefficients
from policies.routing import NOTHING_CACHED, Cached, Candidate, RouteRequest, Standing
from policies.routing_prediction import predicted_terms

_NEVER = float("inf")
_SHAPES_KEPT = 4
"""For so many times the replicas that there are, what was worked out about them is kept."""

_Shape = tuple[Standing, Coefficients, float, float, float, float, float, float, int]
"""What a standing and the costs there come to, before a prompt is known: seconds for each token,
each attended token, each token of context read and each step; how often what is computed counts;
what is ahead, in seconds; and the tokens of a step."""
_Work = tuple[int, float, float, float]
"""At least so many tokens, steps, attended tokens and tokens of context read (`cost.StepShape`)."""


class PredictedTtft:
    """Where the request costs least time, its own and others', as far as that can be told now.

    Its own is the predicted time to first token. Others' comes from what the replica computes for
    it, `prefill_s`, and is what keeps a fleet from computing the same prefix everywhere as soon as
    that is a little faster for one request:

    - *Who comes behind it* waits that much longer. In a queue that changes by one at a time, who
      goes leaves as many behind as who comes has found, on average: `waiting`.
    - *What it pushes out* of a full cache is as much. With the chance `reuse` somebody will compute
      that again, wait as long, and push out as much in turn. Two such turns are counted: the
      chain ends as soon as something goes that nobody misses, and however little is known, a
      queue that costs more than computing three times is left.

    So a choice costs `ttft_s + (waiting + reuse + reuse**2) * prefill_s`, seconds all of it. A hot
    prefix spreads when its queue costs more than another copy does, and no earlier.

    *Ties.* Predictions differ by what the replicas' cost models have learned as well as by the
    replicas: candidates within `noise` of the least, measured on the request's own part of the
    cost, are equal, and chance decides. So prefixes that nobody has are spread evenly over idle
    replicas, also where one of them has a few tokens of every prompt. The queue is no part of the
    measure: under load it is most of the cost, and what is warm would drown in it.

    *Promises.* Where the least cost is too late for what the request was promised (`due_s`), the
    least cost is taken among those that are in time, if there are any.
    """

    def __init__(self, noise: float = 0.1) -> None:
        """`noise`: the relative error of a prediction, about; at least 0."""
        if noise < 0:
            raise ValueError(f"noise must be at least 0, not {noise}")
        self._noise = noise
        self._shapes: dict[str, _Shape] = {}

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate], random: Random) -> int:
        """The least cost, in time if that can be; among equals, any."""
        chosen = self._cheapest(request, candidates, random)
        due_s = request.due_s
        if due_s is None or sum(predicted_terms(request, (candidates[chosen],))[0]) <= due_s:
            return chosen
        in_time = [
            index
            for index, terms in enumerate(predicted_terms(request, candidates))
            if sum(terms) <= due_s and not candidates[index].standing.full
        ]
        if not in_time:
            return chosen
        return in_time[self._cheapest(request, [candidates[i] for i in in_time], random)]

    def _cheapest(
        self, request: RouteRequest, candidates: Sequence[Candidate], random: Random
    ) -> int:
        floors = self._floors_s(request, candidates)
        lowest = floors.index(min(floors))
        if floors[lowest] == _NEVER:  # all are full: then that tells nothing
            return self._cheapest(request, [_not_full(one) for one in candidates], random)
        first = self._costs_s(request, [candidates[lowest]])[0]
        # whoever costs least, its equals cost no more than this one and its noise
        within_s = first[0] * (1.0 + self._noise)
        others = [
            index for index, floor_s in enumerate(floors) if floor_s <= within_s and index != lowest
        ]
        if not others:
            return lowest
        costs = {lowest: first}

        def look_at(indices: Sequence[int]) -> None:
            found = self._costs_s(request, [candidates[index] for index in indices])
            costs.update(zip(indices, found, strict=True))

        if cheaper := [index for index in others if floors[index] < first[0]]:
            look_at(cheaper)
        least_s, own_s = min(costs.values())
        bound_s = least_s + self._noise * own_s
        likely = [index for index in (lowest, *others) if floors[index] <= bound_s]
        # most of them need not be looked at: whoever is drawn and is none of the equals leaves each
        # of these the same chance
        drawn = random.choice(likely)
        if drawn not in costs:
            look_at([drawn])
        if costs[drawn][0] <= bound_s:
            return drawn
        look_at([index for index in likely if index not in costs])
        return random.choice([index for index in likely if costs[index][0] <= bound_s])

    def _floors_s(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[float]:
        """For each candidate no more than it costs, and mostly little less; infinite for one that
        is full. A few operations each, so that only a handful has to be looked at closely.

        A prompt takes at least as many steps as if nobody ran beside it. What would have to be
        loaded from a lower tier is taken to be there, and what is computed then to attend to
        nothing, in no more steps than tokens fill. Of a step under way at least half is ahead. Of
        what other flows of its priority have queued, nothing is certain to be.
        """
        prompt_tokens, priority, flow = request.prompt_tokens, request.priority, request.flow
        shapes = self._shapes
        if len(shapes) > _SHAPES_KEPT * len(candidates):
            shapes.clear()
        known_cached: Cached | None = None
        known_step_tokens = 0
        cold: _Work | None = None
        uncached, steps, attended, read = 0, 0.0, 0.0, 0.0
        floors = []
        for name, cost, standing, cached in candidates:
            if standing.full:
                floors.append(_NEVER)
                continue
            shape = shapes.get(name)
            if shape is None or shape[0] is not standing or shape[1] is not cost:
                shape = shapes[name] = _shape_of(standing, cost)
            _, _, token_s, attended_s, read_s, step_s, turns, ahead_s, step_tokens = shape
            if cached is not known_cached or step_tokens != known_step_tokens:
                if step_tokens != known_step_tokens:
                    cold = None
                known_cached, known_step_tokens = cached, step_tokens
                if cached is not NOTHING_CACHED:
                    work = _least_work(prompt_tokens, cached, step_tokens)
                elif cold is None:
                    work = cold = _least_work(prompt_tokens, cached, step_tokens)
                else:
                    work = cold
                uncached, steps, attended, read = work
            queued = standing[6]
            if queued and (len(queued) > 1 or queued[0][3] != flow or queued[0][0] > priority):
                pending = standing[0]
                for its_priority, _, tokens, its_flow, _, _ in queued:
                    if its_priority > priority or (its_priority == priority and its_flow != flow):
                        pending -= tokens
                ahead_s = _ahead_s(pending, cost)
            floors.append(
                turns
                * (token_s * uncached + attended_s * attended + read_s * read + step_s * steps)
                + ahead_s
            )
        return floors

    def _costs_s(
        self, request: RouteRequest, candidates: Sequence[Candidate]
    ) -> list[tuple[float, float]]:
        """What choosing each costs, and how much of that is the request's own part."""
        costs = []
        for (queue_s, load_s, prefill_s), candidate in zip(
            predicted_terms(request, candidates), candidates, strict=True
        ):
            standing = candidate[2]
            reuse = standing[8]
            own_s = load_s + prefill_s * (1.0 + standing[1] + reuse + reuse * reuse)
            costs.append((queue_s + own_s, own_s))
        return costs


def _shape_of(standing: Standing, cost: Coefficients) -> _Shape:
    """What a replica does with any prompt at least."""
    reuse = standing.reuse
    return (
        standing,
        cost,
        cost.token_s,
        cost.attended_s,
        cost.context_read_s,
        cost.constant_s
        + cost.sequence_s
        + standing.running * (cost.token_s + cost.sequence_s)
        + standing.context_tokens * (cost.attended_s + cost.context_read_s),
        1.0 + standing.waiting + reuse + reuse * reuse,
        _ahead_s(standing.pending_tokens, cost),
        cost.step_tokens,
    )


def _ahead_s(pending_tokens: int, cost: Coefficients) -> float:
    """What so many tokens in front take at least: each its own time and its share of a full step's
    constant, and half of those in the step under way."""
    step_tokens = cost.step_tokens
    ahead = pending_tokens - 0.5 * min(pending_tokens, step_tokens)
    return (cost.token_s + cost.constant_s / step_tokens) * ahead


def _least_work(prompt_tokens: int, cached: Cached, step_tokens: int) -> _Work:
    """What is left of a prompt to compute."""
    device, dram, redis = cached
    if dram or redis:
        uncached = max(1, prompt_tokens - device - dram - redis)
        return uncached, uncached / step_tokens, 0.0, 0.0
    uncached = prompt_tokens - device
    if uncached < 1:
        uncached = 1
    context = prompt_tokens - uncached
    full = (uncached - 1) // step_tokens  # steps before the last
    attended = 0.5 * uncached * (prompt_tokens + context + 1)
    return (
        uncached,
        full + 1,
        attended,
        (full + 1) * (context + 0.5 * step_tokens * full) + uncached,
    )


def _not_full(candidate: Candidate) -> Candidate:
    return candidate._replace(standing=candidate.standing._replace(full=False))
