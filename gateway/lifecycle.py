"""Whether the gateway takes requests, and how many it still owes an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum


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

    @contextmanager
    def request(self) -> Iterator[None]:
        """Held from taking a request to the last byte of its answer."""
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

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
