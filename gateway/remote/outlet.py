"""The client's side of a streamed answer that may have to wait for its status.

Until a server has answered, an error can still be a real status. So the client's stream opens with
the first event, or when there has been silence for so long that something must be sent.
"""

from __future__ import annotations

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
        self._must_open_s = monotonic() + times.heartbeat_s

    async def __aenter__(self) -> Outlet:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._events is not None:
            await self._events.__aexit__(kind, error, trace)

    @property
    def opened(self) -> bool:
        """Whether the client has a status already."""
        return self._events is not None

    @property
    def patience_s(self) -> float:
        """How long it may stay closed."""
        return max(0.0, self._must_open_s - monotonic())

    async def open(self) -> EventStream:
        """Send status and headers, once; comments follow by themselves while there is nothing to
        say."""
        if self._events is None:
            stream = EventStream(self._call, self._headers(), self._times)
            self._events = await stream.__aenter__()
        return self._events

    async def send(self, frames: bytes | bytearray) -> None:
        """Send whole events."""
        await (self._events or await self.open()).send(frames)

    async def end(self, frames: bytes | bytearray) -> None:
        """Send the last events and with them the answer's end."""
        await (self._events or await self.open()).end(frames)
