"""What jobs owe for the work done for them, whose prompt comes first by it, and what classes were
served."""

from __future__ import annotations

from collections import defaultdict

from policies.fairness import GENERATED_UNITS, TokenCounters
from policies.floors import Served
from policies.job import Job


class Meter:
    """Charges flows, in the terms of `policies.fairness`. Not thread-safe.

    A job is paid for in the class that it began in, whatever it is urged to later.
    """

    def __init__(self) -> None:
        self._counters: dict[int, TokenCounters] = {}
        self._served: defaultdict[int, int] = defaultdict(int)
        self._in_turns: dict[int, float] = {}

    def counters(self, priority: int) -> TokenCounters:
        """Those of the flows of one class."""
        counters = self._counters.get(priority)
        if counters is None:
            counters = self._counters[priority] = TokenCounters()
        return counters

    def tag(self, job: Job) -> float:
        """The virtual time at which the job's prompt is computed, if it begins next of its flow:
        the place that it has among the prompts of its class which are under way."""
        if job.tag is not None:
            return job.tag
        count = self.counters(job.rank.priority).count(job.flow)
        return count + job.uncached / job.weight

    def precedes(self, waiting: Job, under_way: Job) -> bool:
        """Whether a waiting prompt comes before one that is under way: one of a more urgent class,
        or one of another flow that, shared fairly, would be through before this one."""
        if waiting.rank.priority != under_way.rank.priority:
            return waiting.rank.priority < under_way.rank.priority
        if waiting.flow == under_way.flow and not waiting.begun:
            return False
        return self.tag(waiting) < self.tag(under_way)

    def begin(self, job: Job, found_tokens: int) -> None:
        """The job is let in and starts behind `found_tokens`: it pays for the others, and for the
        answer that is expected."""
        counters = job.counters = self.counters(job.rank.priority)
        computes = max(0, job.known - max(found_tokens, job.charged))
        if job.tag is None:
            counters.begin(job.flow)
            job.tag = counters.count(job.flow) + computes / job.weight
        answer = counters.expected_answer_tokens(job.flow, job.max_tokens)
        generates = max(1.0, answer - job.generated)
        job.prepaid = computes + GENERATED_UNITS * generates
        counters.charge(job.flow, job.prepaid, job.weight)

    def serve(self, job: Job, end: int, *, generates: bool) -> None:
        """Its tokens from `computed` to `end` are computed, and one more is generated or not. What
        had been computed before a preemption costs nothing again."""
        units = 1 if generates else 0
        before = max(job.charged, job.computed)
        if end > before:
            units += end - before
            job.charged = end
        priority = job.rank[0]
        self._served[priority] += units
        if job.turn:
            in_turn = min(job.turn, units)
            job.turn -= in_turn
            self._in_turns[priority] = self._in_turns.get(priority, 0.0) + in_turn
        job.prepaid -= units
        if job.prepaid < 0:
            self.settle(job)

    def settle(self, job: Job) -> None:
        """Settle what it has paid for and not got, as when it runs no longer, or got and not paid
        for."""
        if job.counters is not None:
            job.counters.charge(job.flow, -job.prepaid, job.weight)
            job.prepaid = 0.0

    def end(self, job: Job) -> None:
        """It does not come back: its answer says how long the next ones will be."""
        if job.counters is not None and job.generated:
            job.counters.learn_answer(job.flow, job.generated)

    def moved(self, job: Job) -> None:
        """The job's class is another now, where nobody's prompt comes before its own."""
        if job.tag is not None:
            job.tag = self.counters(job.rank.priority).time

    def take_served(self) -> Served:
        """What each priority was served since the last time."""
        served = Served(self._served, self._in_turns)
        self._served, self._in_turns = defaultdict(int), {}
        return served


def place(job: Job) -> tuple[int, float, int]:
    """Sorts the prompts that are under way, all of which `Meter.begin` has seen."""
    assert job.tag is not None
    return job.rank.priority, job.tag, job.rank.arrival
