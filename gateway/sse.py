"""Server-sent events: headers at once, one send per step, comments while there is nothing to say.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Any

import orjson

from gateway.http_call import ClientDisconnectedError, Header, HttpCall
from gateway.http_disconnect import Interruption

DONE = b"data: [DONE]\n\n"

_UNICODE_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)

_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def event(value: object) -> bytes:
    """One event with a JSON value."""
    return b"data: " + json_line(value) + b"\n\n"


def json_line(value: object) -> bytes:
    """JSON without anything that a client could take for the end of a line.

    Only CR and LF end one here, and JSON escapes those; but clients that split text with Unicode's
    line ends, as Python's `str.splitlines` does, would cut an event in two at the others.
    """
    encoded = orjson.dumps(value)
    if not encoded.isascii():
        for line_end, escape in _UNICODE_LINE_ENDS:
            encoded = encoded.replace(line_end, escape)
    return encoded


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """`heartbeat_s` of silence bring a comment, so that no proxy takes the stream for dead.
    `stall_s` is how long one send may wait for a client that does not read."""

    heartbeat_s: float = 10.0
    stall_s: float = 60.0


class EventStream:
    """An open event stream. `end` closes it; leaving it without leaves the answer cut off.

    A client that does not read holds up `send` and nothing else: what is produced meanwhile waits
    where it is produced, in one piece. After `stall_s` of that ClientDisconnectedError is raised.
    """

    def __init__(
        self,
        call: HttpCall,
        headers: Iterable[Header],
        times: StreamTimes,
        task: asyncio.Task[Any] | None = None,
    ) -> None:
        """`task` is who sends, and is interrupted when nobody reads; None: who enters the scope."""
        self._task = task
        self._call = call
        self._headers = headers
        self._times = times
        self._tick_s = min(times.heartbeat_s, times.stall_s) / 4
        self._last_sent_s = 0.0
        self._sending_since_s: float | None = None
        self._speaking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EventStream:
        await self._call.start(200, [*_HEADERS, *self._headers])
        self._last_sent_s = monotonic()
        self._interruption = Interruption(self._task)
        self._call.rounds.join(self._attend, self._tick_s)
        return self

    async def send(self, frames: bytes | bytearray, *, more: bool = True) -> None:
        """Send whole events; the last ones if there are no `more`."""
        self._sending_since_s = monotonic()
        await self._call.send(bytes(frames), more=more)
        self._sending_since_s = None
        self._last_sent_s = monotonic()

    async def end(self, frames: bytes | bytearray) -> None:
        """Send the last events and with them the answer's end."""
        if self._speaking is not None:
            self._speaking.cancel()
        await self.send(frames, more=False)
        self._last_sent_s = math.inf  # nothing may follow

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call.rounds.leave(self._attend)
        if self._speaking is not None:
            self._speaking.cancel()
        if kind is asyncio.CancelledError and self._interruption.absorbs_cancellation():
            raise ClientDisconnectedError from None

    def _attend(self) -> None:
        """Speak when there is silence, give up when nobody listens. Looks now and then: that costs
        many streams less than a task or a timer of each of them."""
        now_s = monotonic()
        if self._sending_since_s is not None:
            if now_s - self._sending_since_s >= self._times.stall_s:
                self._call.rounds.leave(self._attend)
                self._interruption.fire()
        elif now_s - self._last_sent_s >= self._times.heartbeat_s and (
            self._speaking is None or self._speaking.done()
        ):
            self._last_sent_s = now_s
            self._speaking = asyncio.create_task(self._speak())

    async def _speak(self) -> None:
        try:
            async with asyncio.timeout(self._times.stall_s):
                await self._call.send(_KEEP_ALIVE, more=True)
        except TimeoutError:
            self._interruption.fire()
