"""A small share for less urgent classes, however much more urgent work there is.

A class that is held back earns `FLOOR_SHARE` of what is served to the classes before it, less what
it is served beside them anyway. Once that is a grant's worth, its first sequence has a turn: it
takes the next slot that comes free, computes before the others though only part of the step, and
gives up neither slot nor pages to the more urgent until the grant is used up. So every turn brings
something that was not computed before, and a sequence that is preempted again and again still ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from policies.service_class import ServiceClass

FLOOR_SHARE = 0.05
TURN_SHARE = 4
"""In its turn, a sequence computes one part in so many of what a step has for prompts."""
_GRANTS_KEPT = 8
"""No more credit than for so many turns is kept."""
_DOOR_REST = 16
"""For each step in which the door was closed it stays open for so many."""
_LAST = max(each.priority for each in ServiceClass)
"""Behind the classes there is only what nobody asked for, such as copies made ahead of time."""


class Served(NamedTuple):
    """Units by priority that a step served, and how many of those in turns."""

    units: Mapping[int, int]
    in_turns: Mapping[int, float]


class ClassFloors:
    """Credit by priority, in the units of `policies.fairness`. `grant` is what one turn is worth.

    A prompt can be so long that its pages never are free at once while the more urgent come and go.
    With all the credit that can be had, its class may *close the door*: nobody else is let in until
    it is. At most one step in `_DOOR_REST` + 1 is spent like that.
    """

    def __init__(self, grant: float) -> None:
        self._grant = grant
        self._credit: dict[int, float] = {}
        self._door: int | None = None
        self._door_closed = False
        self._door_rest = 0

    def credit(self, priority: int) -> float:
        """What the class has earned and not used."""
        return self._credit.get(priority, 0.0)

    def step(self, served: Served, held_back: Collection[int]) -> None:
        """A step is over. `held_back` are the classes that could have used more of it; others lose
        their credit, as nothing is saved up for later."""
        if self._credit:
            for priority in [each for each in self._credit if each not in held_back]:
                del self._credit[priority]
        for priority in held_back:
            before = 0
            for other, units in served.units.items():
                if other < priority:
                    before += units
            if before and priority <= _LAST:
                beside = served.units.get(priority, 0) - served.in_turns.get(priority, 0.0)
                earned = FLOOR_SHARE * before - beside
                credit = self._credit.get(priority, 0.0) + earned
                self._credit[priority] = min(max(credit, 0.0), _GRANTS_KEPT * self._grant)
        if self._door_closed:
            self._door_rest += _DOOR_REST
        else:
            self._door = None
            self._door_rest = max(0, self._door_rest - 1)
        self._door_closed = False

    def due(self) -> list[int]:
        """The classes that have a turn, the most urgent first."""
        if not self._credit:
            return []
        return sorted(each for each, credit in self._credit.items() if credit >= self._grant)

    def take(self, priority: int) -> float:
        """The class takes its turn; what it is worth."""
        self._credit[priority] = self.credit(priority) - self._grant
        if self._door == priority:
            self._door = None
        return self._grant

    def give_back(self, priority: int, units: float) -> None:
        """Of a turn that has ended early."""
        if units and priority in self._credit:
            full = _GRANTS_KEPT * self._grant
            self._credit[priority] = min(self._credit[priority] + units, full)

    def closes_door(self, priority: int) -> bool:
        """A class that is due finds no pages: whether nobody else is let in in this step. Once
        closed, the door stays so for as long as this is asked in every step."""
        if self._door is None and not self._door_rest:
            if self.credit(priority) < _GRANTS_KEPT * self._grant:
                return False
            self._door = priority
        self._door_closed = self._door == priority
        return self._door_closed
