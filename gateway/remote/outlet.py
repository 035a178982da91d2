"""The client's side of a streamed answer that may have to wait for its status.

Until a server has answered, an error can still be a real status. So the client's stream opens with
the first event, or when there has been silence for so long that something must be sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic
from types import TracebackType

from gateway.http_call import Header, HttpCall
from gateway.sse import EventStream, StreamTimes


class Outlet:
    """An async scope. Used from the task that answers the request only."""

    def __init__(
        self, call: HttpCall, headers: Callable[[], Iterable[Header]], times: StreamTimes
    ) -> None:
        """`headers` are asked for when the stream opens."""
        self._call = call
        self._headers = headers
        self._times = times
        self._events: EventStream | None = None
        self._opening: asyncio.Task[EventStream] | None = None

    async def __aenter__(self) -> Outlet:
        self._task = asyncio.current_task()
        self._since_s = monotonic()
        self._call.rounds.join(self._attend, self._times.heartbeat_s / 4)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call.rounds.leave(self._attend)
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait((self._opening,))
            if not self._opening.cancelled():
                self._opening.exception()  # whoever sent something has heard of it
        if self._events is not None:
            await self._events.__aexit__(kind, error, trace)

    @property
    def opened(self) -> bool:
        """Whether the client has a status already, or is being sent one."""
        return self._events is not None or self._opening is not None

    async def send(self, frames: bytes | bytearray) -> None:
        """Send whole events."""
        await (self._events or await self._opened()).send(frames)

    async def end(self, frames: bytes | bytearray) -> None:
        """Send the last events and with them the answer's end."""
        await (self._events or await self._opened()).end(frames)

    def _attend(self) -> None:
        """Once the client has waited long it gets its stream, and comments while there is nothing
        to say."""
        if monotonic() - self._since_s < self._times.heartbeat_s:
            return
        self._call.rounds.leave(self._attend)
        self._opening = asyncio.create_task(self._open())

    async def _opened(self) -> EventStream:
        self._call.rounds.leave(self._attend)
        if self._opening is not None:
            await self._opening
        return self._events or await self._open()

    async def _open(self) -> EventStream:
        """Send status and headers."""
        stream = EventStream(self._call, self._headers(), self._times, self._task)
        self._events = await stream.__aenter__()
        return stream
