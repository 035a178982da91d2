"""Who waits to run, and in which order they are let in.

The most urgent class first. In a class, those that have run before go on first, so that what was
begun is finished; then the flows in the order of their counters (`policies.fairness`); in a flow
what is due first (`policies.scheduling.due_s`), and of what is due together what came first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

from engine.meter import Meter
from engine.sequence import Sequence
from policies.fairness import TokenCounters
from policies.scheduling import due_s


class WaitingLine:
    """Lines of every class and flow. Step-loop thread only, but for `len`."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._classes: dict[int, _ClassLine] = {}
        self._priorities: list[int] = []  # of those classes in which somebody waits, in order
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """Everybody, class by class."""
        for priority in self._priorities:
            line = self._classes[priority]
            yield from line.begun
            for waiting in line.flows.values():
                yield from waiting

    @property
    def priorities(self) -> list[int]:
        """Of the classes in which somebody waits, the most urgent first; not to be changed."""
        return self._priorities

    def add(self, sequence: Sequence) -> None:
        """At its place in line; `sequence.due_s` is known."""
        priority = sequence.rank.priority
        line = self._classes.get(priority)
        if line is None:
            line = self._classes[priority] = _ClassLine(self._meter.counters(priority))
        if not line:
            insort(self._priorities, priority)
        line.add(sequence)
        self._count += 1

    def remove(self, sequence: Sequence) -> bool:
        """Take it out of the line; False if it did not wait."""
        priority = sequence.rank.priority
        line = self._classes.get(priority)
        if line is None or not line.remove(sequence):
            return False
        self._count -= 1
        if not line:
            self._priorities.remove(priority)
        return True

    def in_order(self, now_s: float) -> Iterator[Sequence]:
        """Everybody in the order of turns, for as long as nobody is charged but who is let in.

        The one that was yielded last may be removed before the next one is asked for.
        """
        for priority in self._priorities.copy():
            yield from self._classes[priority].in_order(now_s)

    def of_class(self, priority: int, now_s: float) -> Iterator[Sequence]:
        """Those of one class in the order of turns, as `in_order`."""
        line = self._classes.get(priority)
        return iter(()) if line is None else line.in_order(now_s)


class _ClassLine:
    """One class's waiting: `begun` in the order of arrival, and each flow's own by due times."""

    def __init__(self, counters: TokenCounters) -> None:
        self.begun: list[Sequence] = []
        self.flows: dict[bytes, list[Sequence]] = {}
        self._counters = counters

    def __bool__(self) -> bool:
        return bool(self.begun or self.flows)

    def add(self, sequence: Sequence) -> None:
        if sequence.begun:
            insort(self.begun, sequence, key=_arrival)
            return
        flow = sequence.request.flow
        waiting = self.flows.get(flow)
        if waiting is None:
            waiting = self.flows[flow] = []
            self._counters.wait(flow)
        insort(waiting, sequence, key=_due)

    def remove(self, sequence: Sequence) -> bool:
        flow = sequence.request.flow
        waiting = self.begun if sequence.begun else self.flows.get(flow, [])
        try:
            waiting.remove(sequence)
        except ValueError:
            return False
        if not waiting and not sequence.begun:
            del self.flows[flow]
            self._counters.wait_no_more(flow)
        return True

    def in_order(self, now_s: float) -> Iterator[Sequence]:
        yield from self.begun.copy()
        heads: list[tuple[float, float, int, int, list[Sequence]]] = []
        for flow, waiting in self.flows.items():
            _put_late_ones_back(waiting, now_s)
            heads.append(self._head(flow, waiting, 0))
        heapify(heads)
        while heads:
            *_, index, waiting = heads[0]
            sequence = waiting[index]
            yield sequence
            if index < len(waiting) and waiting[index] is sequence:  # it was passed over
                index += 1
            if index < len(waiting):
                heapreplace(heads, self._head(sequence.request.flow, waiting, index))
            else:
                heappop(heads)

    def _head(
        self, flow: bytes, waiting: list[Sequence], index: int
    ) -> tuple[float, float, int, int, list[Sequence]]:
        sequence = waiting[index]
        return (
            self._counters.count(flow),
            sequence.due_s,
            sequence.rank.arrival,  # no two are alike: the lists are never compared
            index,
            waiting,
        )


def _put_late_ones_back(waiting: list[Sequence], now_s: float) -> None:
    """Who has missed its deadline waits like one without, at the place that this is."""
    while waiting[0].due_s < now_s:
        sequence = waiting[0]
        later_s = due_s(sequence.arrived_s, sequence.request.deadline_s, now_s)
        if later_s <= sequence.due_s:
            return
        sequence.due_s = later_s
        del waiting[0]
        insort(waiting, sequence, key=_due)


def _due(sequence: Sequence) -> tuple[float, int]:
    return sequence.due_s, sequence.rank.arrival


def _arrival(sequence: Sequence) -> int:
    return sequence.rank.arrival
