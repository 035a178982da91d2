"""How an answer goes back: event by event as it comes, or whole at its end."""

from __future__ import annotations

from contextlib import aclosing

import structlog

from gateway.choice import GenerationFailedError, outputs_of
from gateway.deadline import OutOfTime, in_time, out_of_time
from gateway.errors import ApiError, internal_error, unavailable
from gateway.http_call import Header
from gateway.ledger.price_answer import cost_header
from gateway.replica import ReplicaUnavailable
from gateway.request import Request
from gateway.sse import DONE, EventStream, StreamTimes, event
from gateway.text_choice import TokenEntry
from gateway.wire.reply import ReplyFormat, WholeChoice
from gateway.wire.usage import Usage

_log = structlog.get_logger("forebay.request")

_RETRY_AFTER_S = 1
_RECOVERY_S = 5
"""About what a worker takes to be back."""


async def stream_answer(
    request: Request,
    reply: ReplyFormat,
    times: StreamTimes,
    *,
    include_usage: bool,
) -> None:
    """One send per wake-up with everything that has arrived, and the end together with the last.

    What breaks off the generation becomes one error event, then the answer ends without a finish
    reason and without [DONE], and the ApiError is raised: who waits for either of them knows that
    the answer is not whole.
    """
    async with EventStream(request.call, answer_headers(request), times) as events:
        try:
            async with in_time(request.terms):
                await _stream_choices(request, reply, events, include_usage=include_usage)
        except Exception as error:
            failure = _as_api_error(request, error)
            if failure is None:
                raise
            await events.end(event(failure.envelope()))
            raise failure from error


async def _stream_choices(
    request: Request, reply: ReplyFormat, events: EventStream, *, include_usage: bool
) -> None:
    unfinished = len(request.choices)
    async with aclosing(outputs_of(request.choices)) as batches:
        async for batch in batches:
            frames = bytearray()
            for choice, output in batch:
                delta = await choice.advance(output)
                if output.token_ids:
                    request.note_token(output.made_s)
                if not choice.opened:
                    choice.opened = True
                    frames += reply.opening(choice.index)
                if delta.text or delta.entries:
                    request.note_text()
                    frames += reply.delta(choice.index, delta)
                if delta.finish_reason is not None:
                    frames += reply.final(choice.index, delta.finish_reason)
                    unfinished -= 1
            if not unfinished:
                if include_usage:
                    frames += reply.usage(request.told_usage())
                await events.end(frames + DONE)
                return
            if frames:
                await events.send(frames)
    raise GenerationFailedError("the engine's outputs ended without a finish reason")


async def whole_answer(request: Request, reply: ReplyFormat) -> None:
    """Wait for every choice, then answer at once. Raises ApiError if one fails."""
    choices = await run_to_end(request)
    usage = request.told_usage()
    headers = answer_headers(request)
    if usage.cost_nusd is not None:
        headers.append(cost_header(usage.cost_nusd))
    if request.shows_receipt:
        headers += [
            (b"x-forebay-cached-tokens", b"%d" % usage.cached_tokens),
            (b"x-forebay-cached-tiers", _tiers(usage)),
            (b"x-forebay-engine-ms", _ms(request.submitted_s, request.last_token_s)),
        ]
    await request.call.answer(200, reply.whole(choices, usage), headers=headers)


async def run_to_end(request: Request) -> list[WholeChoice]:
    """Wait for every choice. Raises ApiError if one fails."""
    try:
        async with in_time(request.terms):
            return await _collect_choices(request)
    except Exception as error:
        failure = _as_api_error(request, error)
        if failure is None:
            raise
        raise failure from error


async def _collect_choices(request: Request) -> list[WholeChoice]:
    texts: list[list[str]] = [[] for _ in request.choices]
    entries: list[list[TokenEntry]] = [[] for _ in request.choices]
    async with aclosing(outputs_of(request.choices)) as batches:
        async for batch in batches:
            for choice, output in batch:
                delta = await choice.advance(output)
                if output.token_ids:
                    request.note_token(output.made_s)
                if delta.text:
                    request.note_text()
                texts[choice.index].append(delta.text)
                entries[choice.index] += delta.entries
    whole: list[WholeChoice] = []
    for choice, pieces, own in zip(request.choices, texts, entries, strict=True):
        if choice.finish_reason is None:
            raise GenerationFailedError("the engine's outputs ended without a finish reason")
        whole.append(WholeChoice(choice.index, "".join(pieces), own, choice.finish_reason))
    return whole


def engine_unavailable(error: ReplicaUnavailable) -> ApiError:
    """503 with the replica's own words, which are ours to show."""
    retry_after_s = _RETRY_AFTER_S if error.full else _RECOVERY_S
    return unavailable(str(error), code="engine_unavailable", retry_after_s=retry_after_s)


def _as_api_error(request: Request, error: Exception) -> ApiError | None:
    """What the client is told when generating fails; None for what is not about generating."""
    if isinstance(error, ReplicaUnavailable):
        return engine_unavailable(error)
    if isinstance(error, GenerationFailedError):
        _log.error("generation failed", reason=str(error))
        return internal_error(request.call.request_id)
    if isinstance(error, OutOfTime):
        return out_of_time()
    return None


def answer_headers(request: Request) -> list[Header]:
    """What is left of the tenant's limits; and where the request runs, what its first token was
    predicted to take, and how long it was here before it was sent there, unless the tenant is not
    to see that."""
    headers = list(request.limit_headers)
    if not request.shows_receipt:
        return headers
    receipts = request.receipts()
    replicas = dict.fromkeys(receipt.candidate.name for receipt in receipts)
    headers += [
        (b"x-forebay-replica", ", ".join(replicas).encode()),
        (b"x-forebay-queue-ms", _ms(request.call.body_read_s, request.submitted_s)),
    ]
    if receipts:
        slowest_s = max(receipt.predicted_ttft_s for receipt in receipts)
        headers.append((b"x-forebay-predicted-ttft-ms", b"%.2f" % (slowest_s * 1e3)))
    return headers


def _tiers(usage: Usage) -> bytes:
    """`device=512,dram=0,redis=64`: every tier, from the fastest."""
    return ",".join(f"{tier}={tokens}" for tier, tokens in usage.cached_by_tier.items()).encode()


def _ms(start_s: float | None, end_s: float | None) -> bytes:
    if start_s is None or end_s is None:
        return b"0.00"
    return b"%.2f" % ((end_s - start_s) * 1e3)
