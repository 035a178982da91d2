"""Who goes first, and who gives way.

Between classes `priority` decides, between the flows of one class `policies.fairness`, and within a
flow what is due first (`due_s`); `policies.waiting_line` puts all that together. `policies.floors`
says when a less urgent class has its turn all the same, `policies.step_budget` how much of a prompt
a step computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PATIENCE_S = 30.0
"""Within its flow a request is due so long after it came, unless its deadline is earlier. So nobody
waits longer than that for those who came later, and a deadline that has passed counts no more."""


class Rank(NamedTuple):
    """A running sequence's claim on its slot and pages; the greatest gives them up first.
    `priority` before `arrival`."""

    priority: int
    arrival: int


def due_s(arrived_s: float, deadline_s: float | None, now_s: float) -> float:
    """When a request is due in its flow's line, which is in the order of these times.

    Its deadline, while that can still be met; without one, or when it has passed, `PATIENCE_S`
    after it came: who is late already has nothing to lose by letting those before who are not.
    """
    patience_s = arrived_s + PATIENCE_S
    if deadline_s is None or deadline_s < now_s:
        return patience_s
    return min(deadline_s, patience_s)


def pick_victim(ranks: Sequence[Rank]) -> int:
    """Index of the running sequence that gives its pages back: least urgent, then newest.

    Raises ValueError when there is nobody to pick.
    """
    return max(range(len(ranks)), key=ranks.__getitem__)
