"""One replica's part of a streamed answer."""

from __future__ import annotations

import asyncio

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
        exchange, piece = await _first_piece(attempt, outlet)
        await _pass_on(attempt, exchange, piece, chunks, outlet, request)
        attempt.finish(chunks.usage)
    finally:
        attempt.close()


async def _first_piece(attempt: Attempt, outlet: Outlet) -> tuple[Exchange, bytes]:
    """The head and first bytes of the answer. A client that has waited long for them gets its
    stream opened meanwhile."""
    task = asyncio.create_task(_open(attempt))
    try:
        if not outlet.opened:
            done, _ = await asyncio.wait((task,), timeout=outlet.patience_s)
            if not done:
                await outlet.open()
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # nobody is left to hear of it


async def _open(attempt: Attempt) -> tuple[Exchange, bytes]:
    exchange = await attempt.open()
    require_content_type(exchange, "text/event-stream")
    return exchange, await exchange.read()


async def _pass_on(
    attempt: Attempt,
    exchange: Exchange,
    piece: bytes,
    chunks: Chunks,
    outlet: Outlet,
    request: Request,
) -> None:
    reader = SseReader()
    while True:
        frames, failure = _take(attempt, reader, piece, chunks, request)
        if not piece or chunks.said_done or failure is not None:
            if chunks.complete:  # nothing of it can be missing, whatever came after it
                await outlet.end(frames + chunks.ending())
                return
            if frames:
                await outlet.send(frames)
            raise failure or UpstreamLost(LossKind.ENDED_EARLY)
        if frames:
            await outlet.send(frames)
        elif not outlet.opened and outlet.patience_s == 0:
            await outlet.open()
        if chunks.complete:
            exchange.be_patient(_USAGE_S)
        try:
            piece = await exchange.read()
        except UpstreamLost:
            if not chunks.complete:
                raise
            piece = b""


def _take(
    attempt: Attempt, reader: SseReader, piece: bytes, chunks: Chunks, request: Request
) -> tuple[bytearray, Exception | None]:
    """The client's events from a piece of the server's, up to the one that fails, if one does."""
    frames = bytearray()
    failure: Exception | None = None
    before = chunks.content_events
    cleaner = attempt.placement.replica.cleaner
    try:
        events = reader.feed(piece)
        for data in events:
            frames += chunks.take(data, cleaner)
        if events and chunks.has_content:
            attempt.note_tokens(len(events))
    except (UpstreamLost, ApiError, AnswerDiffers) as error:
        failure = error
    if chunks.content_events > before:
        request.note_token()
        if request.relayed is not None:
            # what is known should the answer break off: its usage comes at its end
            request.relayed.prompt_tokens = attempt.prompt_tokens
            request.relayed.completion_tokens = chunks.content_events
    return frames, failure
