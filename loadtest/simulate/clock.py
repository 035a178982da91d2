"""Simulated time, and what is to happen when."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[int], None]


class Clock:
    """`now_s` is the time; what is due together happens in the order in which it was planned."""

    __slots__ = ("_planned", "_plans", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._plans: list[tuple[float, int, Action, int]] = []
        self._planned = 0

    @property
    def next_s(self) -> float:
        """When something is due next; infinity: never."""
        return self._plans[0][0] if self._plans else float("inf")

    def at(self, when_s: float, action: Action, argument: int = 0) -> None:
        """Do it then, or now if that has passed."""
        self._planned += 1
        heappush(self._plans, (max(when_s, self.now_s), self._planned, action, argument))

    def step(self) -> None:
        """Go on to what is due next, and do it. Raises IndexError if there is nothing."""
        self.now_s, _, action, argument = heappop(self._plans)
        action(argument)
