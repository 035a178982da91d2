"""One replica's part of a streamed answer."""

from __future__ import annotations

from gateway.errors import ApiError
from gateway.remote.attempt import Attempt, require_content_type
from gateway.remote.chunks import Chunks
from gateway.remote.exchange import Exchange
from gateway.remote.failures import LossKind, UpstreamLost
from gateway.remote.outlet import Outlet
from gateway.remote.sse_reader import SseReader
from gateway.remote.transcript import AnswerDiffers
from gateway.request import Request

_USAGE_S = 5.0
"""How long to wait for the usage once every choice has its finish reason."""


async def relay_stream(attempt: Attempt, chunks: Chunks, outlet: Outlet, request: Request) -> None:
    """Pass on what the replica says until the answer is whole, one send per read.

    Raises as `Attempt` does; UpstreamLost also where the stream breaks off or is no stream of
    chunks, AnswerDiffers where it says something else than the client has the beginning of. What
    came before that has gone to the client.
    """
    try:
        exchange = await attempt.open()
        require_content_type(exchange, "text/event-stream")
        await _pass_on(attempt, exchange, chunks, outlet, request)
        attempt.finish(chunks.usage)
    finally:
        attempt.close()


async def _pass_on(
    attempt: Attempt,
    exchange: Exchange,
    chunks: Chunks,
    outlet: Outlet,
    request: Request,
) -> None:
    reader = SseReader()
    piece = await exchange.read()
    last_event_s = exchange.last_heard_s
    while True:
        events, frames, failure = _take(attempt, exchange, reader, piece, chunks, request)
        if events:
            last_event_s = exchange.last_heard_s
        elif failure is None and piece:
            # comments are a sign of life, but not for ever
            longest_s = _USAGE_S if chunks.complete else attempt.placement.replica.times.whole_s
            if exchange.last_heard_s - last_event_s > longest_s:
                failure = UpstreamLost(LossKind.STALLED, "nothing but comments")
        if not piece or chunks.said_done or failure is not None:
            if chunks.complete:  # nothing of it can be missing, whatever came after it
                await outlet.end(frames + chunks.ending())
                return
            if frames:
                await outlet.send(frames)
            raise failure or UpstreamLost(LossKind.ENDED_EARLY)
        if frames:
            await outlet.send(frames)
        if chunks.complete:
            exchange.be_patient(_USAGE_S)
        try:
            piece = await exchange.read()
        except UpstreamLost:
            if not chunks.complete:
                raise
            piece = b""


def _take(
    attempt: Attempt,
    exchange: Exchange,
    reader: SseReader,
    piece: bytes,
    chunks: Chunks,
    request: Request,
) -> tuple[int, bytearray, Exception | None]:
    """How many events there are in a piece of the server's, and the client's for them, up to the
    one that fails, if one does."""
    frames = bytearray()
    events: list[bytes] = []
    failure: Exception | None = None
    before = chunks.content_events
    try:
        events = reader.feed(piece)
        chunks.take(events, attempt.placement.replica.cleaner, frames)
        if events and chunks.has_content:
            attempt.note_tokens(len(events), exchange.heard_s)
    except (UpstreamLost, ApiError, AnswerDiffers) as error:
        failure = error
    if chunks.content_events > before:
        request.note_token(exchange.heard_s)
        if request.first_text_s is None and chunks.shows_text:
            request.note_text()
        if request.relayed is not None:
            # what is known should the answer break off: its usage comes at its end
            request.relayed.completion_tokens = chunks.content_events
    return len(events), frames, failure
