"""Who waits to run, and in which order they are let in.

The most urgent class first. In a class, those that have run before go on first, so that what was
begun is finished; then the flows in the order of their counters (`policies.fairness`); in a flow
what is due first (`policies.scheduling.due_s`), and of what is due together what came first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from typing import Generic, TypeVar

from policies.fairness import TokenCounters
from policies.job import Job
from policies.meter import Meter
from policies.scheduling import due_s

JobT = TypeVar("JobT", bound=Job)


class WaitingLine(Generic[JobT]):
    """Lines of every class and flow. `len` may be asked from any thread."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._classes: dict[int, _ClassLine[JobT]] = {}
        self._priorities: list[int] = []  # of those classes in which somebody waits, in order
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[JobT]:
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

    def add(self, job: JobT) -> None:
        """At its place in line; `job.due_s` is known."""
        priority = job.rank.priority
        line = self._classes.get(priority)
        if line is None:
            line = self._classes[priority] = _ClassLine(self._meter.counters(priority))
        if not line:
            insort(self._priorities, priority)
        line.add(job)
        self._count += 1

    def remove(self, job: JobT) -> bool:
        """Take it out of the line; False if it did not wait."""
        priority = job.rank.priority
        line = self._classes.get(priority)
        if line is None or not line.remove(job):
            return False
        self._count -= 1
        if not line:
            self._priorities.remove(priority)
        return True

    def in_order(self, now_s: float) -> Iterator[JobT]:
        """Everybody in the order of turns, for as long as nobody is charged but who is let in.

        The one that was yielded last may be removed before the next one is asked for.
        """
        for priority in self._priorities.copy():
            yield from self._classes[priority].in_order(now_s)

    def of_class(self, priority: int, now_s: float) -> Iterator[JobT]:
        """Those of one class in the order of turns, as `in_order`."""
        line = self._classes.get(priority)
        return iter(()) if line is None else line.in_order(now_s)


class _ClassLine(Generic[JobT]):
    """One class's waiting: `begun` in the order of arrival, and each flow's own by due times."""

    def __init__(self, counters: TokenCounters) -> None:
        self.begun: list[JobT] = []
        self.flows: dict[bytes, list[JobT]] = {}
        self._counters = counters

    def __bool__(self) -> bool:
        return bool(self.begun or self.flows)

    def add(self, job: JobT) -> None:
        if job.begun:
            insort(self.begun, job, key=_arrival)
            return
        flow = job.flow
        waiting = self.flows.get(flow)
        if waiting is None:
            waiting = self.flows[flow] = []
            self._counters.wait(flow)
        insort(waiting, job, key=_due)

    def remove(self, job: JobT) -> bool:
        flow = job.flow
        waiting = self.begun if job.begun else self.flows.get(flow, [])
        try:
            waiting.remove(job)
        except ValueError:
            return False
        if not waiting and not job.begun:
            del self.flows[flow]
            self._counters.wait_no_more(flow)
        return True

    def in_order(self, now_s: float) -> Iterator[JobT]:
        yield from self.begun.copy()
        heads: list[tuple[float, float, int, int, list[JobT]]] = []
        for flow, waiting in self.flows.items():
            _put_late_ones_back(waiting, now_s)
            heads.append(self._head(flow, waiting, 0))
        heapify(heads)
        while heads:
            *_, index, waiting = heads[0]
            job = waiting[index]
            yield job
            if index < len(waiting) and waiting[index] is job:  # it was passed over
                index += 1
            if index < len(waiting):
                heapreplace(heads, self._head(job.flow, waiting, index))
            else:
                heappop(heads)

    def _head(
        self, flow: bytes, waiting: list[JobT], index: int
    ) -> tuple[float, float, int, int, list[JobT]]:
        job = waiting[index]
        return (
            self._counters.count(flow),
            job.due_s,
            job.rank.arrival,  # no two are alike: the lists are never compared
            index,
            waiting,
        )


def _put_late_ones_back(waiting: list[JobT], now_s: float) -> None:
    """Who has missed its deadline waits like one without, at the place that this is."""
    while waiting[0].due_s < now_s:
        job = waiting[0]
        later_s = due_s(job.arrived_s, job.deadline_s, now_s)
        if later_s <= job.due_s:
            return
        job.due_s = later_s
        del waiting[0]
        insort(waiting, job, key=_due)


def _due(job: Job) -> tuple[float, int]:
    return job.due_s, job.rank.arrival


def _arrival(job: Job) -> int:
    return job.rank.arrival
