"""Whether the gateway takes requests, and how many it still owes an answer."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from types import TracebackType


class Phase(StrEnum):
    """A gateway goes through these in order; LOADING may go to DRAINING directly."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    """Owned by the server, read by the application. Used from the event loop only."""

    def __init__(self) -> None:
        self.phase = Phase.LOADING
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """Models are loaded and new requests are taken."""
        return self.phase is Phase.READY

    @property
    def draining(self) -> bool:
        """No new requests; those in flight may finish."""
        return self.phase in (Phase.DRAINING, Phase.STOPPED)

    @property
    def in_flight(self) -> int:
        """Requests taken and not yet answered to the last byte."""
        return self._in_flight

    def request(self) -> Owed:
        """A scope, from taking a request to the last byte of its answer."""
        return Owed(self)

    def loaded(self) -> None:
        """LOADING becomes READY. A stop that came first stays."""
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def drain(self) -> None:
        """Take no more requests."""
        if self.phase in (Phase.LOADING, Phase.READY):
            self.phase = Phase.DRAINING

    def stopped(self) -> None:
        """Nothing runs any more."""
        self.phase = Phase.STOPPED

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False if that takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class Owed:
    """The scope of one request that is owed an answer."""

    __slots__ = ("_lifecycle",)

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def __enter__(self) -> None:
        lifecycle = self._lifecycle
        lifecycle._in_flight += 1
        lifecycle._idle.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lifecycle = self._lifecycle
        lifecycle._in_flight -= 1
        if lifecycle._in_flight == 0:
            lifecycle._idle.set()
