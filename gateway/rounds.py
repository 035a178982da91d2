"""Looking after something now and then, without a timer for each time that there is something."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_NEVER_S = float("inf")


class Rounds:
    """Calls those who have joined, at least as often as each of them wants. Belongs to the event
    loop.

    Streams are many and mostly short: starting and cancelling a timer for each costs as much as
    several events. Rounds that `linger` go on for one more turn when the last has left, so that
    those who come one after another share a timer; whoever made them stops them in the end.
    """

    __slots__ = ("_attending", "_due_s", "_lingers", "_timer")

    def __init__(self, *, linger: bool = False) -> None:
        self._lingers = linger
        self._attending: dict[Callable[[], None], float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = _NEVER_S

    def join(self, attend: Callable[[], None], every_s: float) -> None:
        """Call `attend` within every so many seconds from now on."""
        self._attending[attend] = every_s
        loop = asyncio.get_running_loop()
        due_s = loop.time() + every_s
        if self._due_s > due_s:
            if self._timer is not None:
                self._timer.cancel()
            self._due_s = due_s
            self._timer = loop.call_at(due_s, self._go_round)

    def leave(self, attend: Callable[[], None]) -> None:
        """Do not call it any more. Idempotent."""
        self._attending.pop(attend, None)
        if not self._attending and not self._lingers:
            self.stop()

    def stop(self) -> None:
        """Call nobody any more."""
        self._attending.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due_s = None, _NEVER_S

    def _go_round(self) -> None:
        self._timer, self._due_s = None, _NEVER_S
        try:
            for attend in tuple(self._attending):
                if attend in self._attending:  # whoever was called before may have sent it away
                    attend()
        finally:
            if self._attending and self._timer is None:
                loop = asyncio.get_running_loop()
                self._due_s = loop.time() + min(self._attending.values())
                self._timer = loop.call_at(self._due_s, self._go_round)
