"""Whose work a replica has: what waits by priority and flow, and who of those that run yields.

Whoever sends work to replicas keeps one of these for each; routing reads it as part of `Standing`.
"""

from __future__ import annotations

from heapq import nlargest
from operator import attrgetter

from policies.arrival_rate import ArrivalRates
from policies.routing import Queued

MOST_URGENT = 0
"""Priorities begin here: nothing of another priority overtakes a sequence of this one."""
MOST_FLOWS = 64
"""So many entries there are of what is queued at most: each costs every decision a little. Of the
flows beyond them, which are those with the least to compute, each priority's are taken together."""
REST = b"*"
"""The flow of such entries: no tag of a tenant's is so short."""


class WorkByPriority:
    """Sequences that have been sent there and are not over. The memory is that of the flows that
    have any waiting, and of `ArrivalRates`."""

    __slots__ = ("_arrivals", "_queued", "_yielding")

    def __init__(self) -> None:
        self._arrivals = ArrivalRates()
        self._queued: dict[tuple[int, bytes], Queued] = {}
        self._yielding: dict[int, int] = {}

    def wait(
        self,
        sequences: int,
        uncached_tokens: int,
        priority: int,
        flow: bytes,
        weight: float,
        now_s: float,
    ) -> None:
        """More sequences wait, or fewer, with so many tokens more or fewer to compute. The last
        that came says what the flow's weight is."""
        place = priority, flow
        before = self._queued.get(place) or Queued(priority, 0, 0, flow)
        if before.sequences + sequences:
            self._queued[place] = Queued(
                priority,
                before.sequences + sequences,
                before.tokens + uncached_tokens,
                flow,
                weight if sequences > 0 else before.weight,
                self._arrivals.per_s(place, max(0, uncached_tokens), now_s),
            )
        else:
            del self._queued[place]

    def run(self, sequences: int, priority: int) -> None:
        """More sequences run, or fewer."""
        if priority > MOST_URGENT:
            yielding = self._yielding.get(priority, 0) + sequences
            if yielding:
                self._yielding[priority] = yielding
            else:
                del self._yielding[priority]

    def queued(self) -> tuple[Queued, ...]:
        """As `Standing.queued`, by priority and flow: no more than `MOST_FLOWS` entries and, behind
        them, one for the rest of each priority."""
        queued = sorted(self._queued.values(), key=_place_in_line)
        if len(queued) <= MOST_FLOWS:
            return tuple(queued)
        most = nlargest(MOST_FLOWS, queued, key=attrgetter("tokens"))
        named = {(each.priority, each.flow) for each in most}
        kept: list[Queued] = []
        rest: dict[int, Queued] = {}
        for each in queued:
            if (each.priority, each.flow) in named:
                kept.append(each)
                continue
            before = rest.get(each.priority, Queued(each.priority, 0, 0, REST, 0.0))
            rest[each.priority] = Queued(
                each.priority,
                before.sequences + each.sequences,
                before.tokens + each.tokens,
                REST,
                before.weight + each.weight,
                before.tokens_per_s + each.tokens_per_s,
            )
        return (*kept, *rest.values())

    def yielding(self) -> tuple[tuple[int, int], ...]:
        """As `Standing.yielding`."""
        return tuple(sorted(self._yielding.items()))


_place_in_line = attrgetter("priority", "flow")
