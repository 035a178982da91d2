"""Doing things again, with growing pauses, while the database is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import structlog

from gateway.batches.turns import is_away

_log = structlog.get_logger("forebay.batch")

_LONGEST_PAUSE_S = 30.0

T = TypeVar("T")


class Patience:
    """It ends when it is told to stop, never within a step."""

    def __init__(self, pause_s: float) -> None:
        """`pause_s` is the first pause of those that insist."""
        self._pause_s = pause_s
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End after the steps that are being done."""
        self._stopping.set()

    async def again(
        self,
        step: Callable[[], Awaitable[None]],
        every_s: float,
        wake: asyncio.Event | None = None,
        longest_pause_s: float = _LONGEST_PAUSE_S,
    ) -> None:
        """Do it every `every_s`, and when woken, until it is time to stop; with pauses that grow to
        `longest_pause_s` while it fails."""
        pause_s = every_s
        failing = False
        while not self._stopping.is_set():
            if wake is not None:
                wake.clear()
            try:
                await step()
            except Exception as error:  # noqa: BLE001 - batches go on once this is over
                if not is_away(error):
                    _log.exception("batches are held up")
                elif not failing:
                    _log.warning(
                        "batches wait for the database, which does not answer",
                        error=type(error).__name__,
                    )
                failing = True
                await _rest(pause_s, self._stopping)
                pause_s = min(longest_pause_s, 2 * pause_s)
                continue
            if failing:
                _log.info("batches go on")
            failing, pause_s = False, every_s
            await _rest(every_s, wake or self._stopping)

    async def insist(self, step: Callable[[], Awaitable[T]]) -> T:
        """Do it once the database answers; raises what it says when it is time to stop."""
        pause_s = self._pause_s
        while True:
            try:
                return await step()
            except Exception as error:
                if not is_away(error) or self._stopping.is_set():
                    raise
            await _rest(pause_s, self._stopping)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


async def _rest(seconds: float, wake: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
