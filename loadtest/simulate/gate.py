"""In front of the fleet: who is let in now, who waits for a better moment, and who is refused.

`policies.admission` judges, corrected by `policies.prediction_biases`. How those wait whom it tells
to is as in `gateway.slo`: looked at when something has changed at the replicas, by class, then by
what was let through for each flow by weight, then by what is due; each for as long as its tenant
says, and so many of them as there is room for. Nobody is told to come again: traces have no clients
that would.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable

from loadtest.simulate.clock import Clock
from loadtest.simulate.desk import Choice, FrontDesk
from loadtest.simulate.job import SimJob
from policies.admission import Ruling, Verdict, Wish, judge, judge_waiting
from policies.prediction_biases import PredictionBiases
from policies.routing import Prediction
from policies.slo import Slo

_LEAST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.25
_HEADS_PER_LOOK = 16
_MOST_WAITING = 1024
_MOST_WAITING_TOKENS = 4 << 20

_Place = tuple[int, bytes]
"""A priority and a flow."""


class Gate:
    """`admit(job, choice)` is called for those who go in, `refuse(job, ruling)` for those who
    do not. `slos` are the tenants'."""

    def __init__(
        self,
        desk: FrontDesk,
        clock: Clock,
        slos: list[Slo],
        max_queue_s: float,
        admit: Callable[[SimJob, Choice], None],
        refuse: Callable[[SimJob, Ruling], None],
    ) -> None:
        self.rulings: Counter[Verdict] = Counter()
        """How newcomers were judged."""
        self._desk = desk
        self._clock = clock
        self._slos = slos
        self._max_queue_s = max_queue_s
        self._admit = admit
        self._refuse = refuse
        self._lines: dict[_Place, list[SimJob]] = {}
        self._waiting: dict[SimJob, Ruling] = {}  # with what was last found
        self._waiting_tokens = 0
        self._served: dict[_Place, float] = {}
        self._looks_at_s = math.inf
        self._looked_s = 0.0
        self._biases = PredictionBiases()
        desk.listen(self)

    @property
    def waiting(self) -> int:
        """How many wait here."""
        return len(self._waiting)

    def arrive(self, job: SimJob) -> None:
        """Somebody has come."""
        choice = self._desk.choose(job)
        ruling = judge(self._corrected(job, choice), self._wish(job))
        self.rulings[ruling.verdict] += 1
        if ruling.verdict is Verdict.ADMIT:
            self._admit(job, choice)
            self.changed()
        elif ruling.verdict is Verdict.QUEUE and self._may_wait(job):
            self._add(job, ruling)
        else:
            self._refuse(job, ruling)

    def began(self, job: SimJob) -> None:
        """It is heard of somebody who was admitted that its first token has come."""
        assert job.first_s is not None
        self._biases.observe(
            job.replica_name,
            job.rank.priority,
            job.flow,
            predicted_s=job.predicted_s,
            actual_s=job.first_s - job.placed_s,
            now_s=self._clock.now_s,
        )

    def changed(self) -> None:
        """Something at the replicas is other than before."""
        if self._waiting:
            self._look_at(self._looked_s + _LEAST_PAUSE_S)

    def _may_wait(self, job: SimJob) -> bool:
        """Whether one more may; if need be, who is less urgent goes for it."""
        if not self._slos[job.tenant].max_queue_s > 0 or job.prompt_tokens > _MOST_WAITING_TOKENS:
            return False
        room_for = _MOST_WAITING_TOKENS - job.prompt_tokens
        while len(self._waiting) >= _MOST_WAITING or self._waiting_tokens > room_for:
            last = max(self._waiting, key=_dispensable)
            if last.rank.priority <= job.rank.priority:
                return False
            ruling = self._waiting[last]
            self._leave(last)
            self._refuse(last, ruling._replace(verdict=Verdict.SHED, reason="places"))
        return True

    def _add(self, job: SimJob, ruling: Ruling) -> None:
        place = _place(job)
        line = self._lines.get(place)
        if line is None:
            rivals = [self._served[each] for each in self._lines if each[0] == place[0]]
            before = self._served.get(place, 0.0)
            self._served[place] = max(before, min(rivals, default=before))
            line = self._lines[place] = []
        insort(line, job, key=_due_s)
        self._waiting[job] = ruling
        self._waiting_tokens += job.prompt_tokens
        now_s = self._clock.now_s
        self._clock.at(now_s + self._slos[job.tenant].max_queue_s, lambda _: self._give_up(job))
        self._look_at(now_s + _LONGEST_PAUSE_S)

    def _give_up(self, job: SimJob) -> None:
        """It has waited for as long as it may, if it still does."""
        ruling = self._waiting.get(job)
        if ruling is not None:
            self._leave(job)
            self._refuse(job, ruling._replace(verdict=Verdict.SHED))

    def _leave(self, job: SimJob) -> None:
        """It waits no longer; who is behind it is looked at."""
        place = _place(job)
        line = self._lines[place]
        line.remove(job)
        if not line:
            del self._lines[place]
        del self._waiting[job]
        self._waiting_tokens -= job.prompt_tokens
        if not self._waiting:
            self._served.clear()
        self.changed()

    def _look_at(self, when_s: float) -> None:
        when_s = max(when_s, self._clock.now_s)
        if when_s < self._looks_at_s:
            self._looks_at_s = when_s
            self._clock.at(when_s, self._look)

    def _look(self, _: int) -> None:
        now_s = self._clock.now_s
        if now_s < self._looks_at_s:
            return  # planned before one that was sooner
        self._looked_s, self._looks_at_s = now_s, math.inf
        if not self._waiting:
            return
        self._look_at(now_s + _LONGEST_PAUSE_S)
        order = sorted(self._lines, key=lambda place: (place[0], self._served[place]))
        for place in order[:_HEADS_PER_LOOK]:
            job = self._lines[place][0]
            choice = self._desk.choose(job)
            ruling = judge_waiting(self._corrected(job, choice), self._wish(job))
            self._waiting[job] = ruling
            if ruling.verdict is Verdict.QUEUE:
                continue
            if ruling.verdict is Verdict.ADMIT:
                self._served[place] += job.prompt_tokens / job.weight
                self._leave(job)
                self._admit(job, choice)
                break
            self._leave(job)
            self._refuse(job, ruling)

    def _corrected(self, job: SimJob, choice: Choice) -> Prediction:
        queue_s, load_s, prefill_s = choice.prediction
        factor = self._biases.factor(
            choice.candidate.name, job.rank.priority, job.flow, self._clock.now_s
        )
        return Prediction(factor * queue_s, factor * load_s, factor * prefill_s)

    def _wish(self, job: SimJob) -> Wish:
        slo = self._slos[job.tenant]
        on_overload = slo.on_overload
        if on_overload == "downgrade" and slo.ttft_s is None:
            on_overload = "reject"
        return Wish(
            ttft_s=slo.ttft_s,
            timeout_s=None,
            elapsed_s=self._clock.now_s - job.asked_s,
            max_queue_s=self._max_queue_s,
            on_overload=on_overload,
        )


def _place(job: SimJob) -> _Place:
    return job.rank.priority, job.flow


def _due_s(job: SimJob) -> float:
    return math.inf if job.deadline_s is None else job.deadline_s


def _dispensable(job: SimJob) -> tuple[int, float]:
    return job.rank.priority, _due_s(job)
