"""In front of the fleet: who is let in now, who waits for a better moment, and who is refused.

`policies.admission` judges; how those wait whom it tells to is as in `gateway.slo`: looked at when
something has changed at the replicas, by class, then by what was let through for each flow by
weight, then by what is due. Nobody is told to come again: traces have no clients that would.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable

from loadtest.simulate.clock import Clock
from loadtest.simulate.desk import Choice, FrontDesk
from loadtest.simulate.job import SimJob
from policies.admission import Ruling, Verdict, Wish, judge, judge_waiting
from policies.prediction_bias import PredictionBias
from policies.routing import Prediction
from policies.slo import Slo

_LEAST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.25
_HEADS_PER_LOOK = 16
_MOST_WAITING = 1024

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
        self._served: dict[_Place, float] = {}
        self.waiting = 0
        """How many wait here."""
        self._looks_at_s = float("inf")
        self._looked_s = 0.0
        self._biases: dict[tuple[int, int, bytes], PredictionBias] = {}

    def arrive(self, job: SimJob) -> None:
        """Somebody has come."""
        choice = self._desk.choose(job)
        ruling = judge(self._corrected(job, choice), self._wish(job))
        self.rulings[ruling.verdict] += 1
        if ruling.verdict is Verdict.ADMIT:
            self._admit(job, choice)
        elif ruling.verdict is Verdict.QUEUE and self.waiting < _MOST_WAITING:
            self._add(job)
        else:
            self._refuse(job, ruling)

    def began(self, job: SimJob, replica: int) -> None:
        """Somebody who was admitted has its first token."""
        now_s = self._clock.now_s
        for flow in (b"", job.flow):
            key = replica, job.rank.priority, flow
            bias = self._biases.get(key)
            if bias is None:
                bias = self._biases[key] = PredictionBias()
            bias.observe(job.predicted_s, now_s - job.placed_s, now_s)
            if not job.flow:
                break
        self.changed()

    def changed(self) -> None:
        """Something at the replicas is other than before."""
        if self.waiting:
            self._look_at(max(self._clock.now_s, self._looked_s + _LEAST_PAUSE_S))

    def _add(self, job: SimJob) -> None:
        place = job.rank.priority, job.flow
        line = self._lines.get(place)
        if line is None:
            rivals = [self._served[each] for each in self._lines if each[0] == place[0]]
            before = self._served.get(place, 0.0)
            self._served[place] = max(before, min(rivals, default=before))
            line = self._lines[place] = []
        insort(line, job, key=_due)
        self.waiting += 1
        self._look_at(self._clock.now_s + _LONGEST_PAUSE_S)

    def _look_at(self, when_s: float) -> None:
        if when_s < self._looks_at_s:
            self._looks_at_s = when_s
            self._clock.at(when_s, self._look)

    def _look(self, _: int) -> None:
        now_s = self._clock.now_s
        if now_s < self._looks_at_s:
            return  # planned before one that was sooner
        self._looked_s, self._looks_at_s = now_s, float("inf")
        order = sorted(self._lines, key=lambda place: (place[0], self._served[place]))
        for place in order[:_HEADS_PER_LOOK]:
            job = self._lines[place][0]
            choice = self._desk.choose(job)
            ruling = judge_waiting(self._corrected(job, choice), self._wish(job))
            if ruling.verdict is Verdict.QUEUE:
                slo = self._slos[job.tenant]
                if now_s - job.arrived_s < slo.max_queue_s:
                    continue
                ruling = ruling._replace(verdict=Verdict.SHED)
            self._remove(place)
            if ruling.verdict is Verdict.ADMIT:
                if self._lines:
                    before = self._served.get(place, 0.0)
                    self._served[place] = before + job.prompt_tokens / job.weight
                self._admit(job, choice)
                break
            self._refuse(job, ruling)
        if self.waiting:
            self._look_at(now_s + _LONGEST_PAUSE_S)

    def _remove(self, place: _Place) -> None:
        line = self._lines[place]
        del line[0]
        self.waiting -= 1
        if not line:
            del self._lines[place]
        if not self._lines:
            self._served.clear()

    def _corrected(self, job: SimJob, choice: Choice) -> Prediction:
        queue_s, load_s, prefill_s = choice.prediction
        priority = job.rank.priority
        bias = self._biases.get((choice.replica, priority, job.flow))
        if bias is None:
            bias = self._biases.get((choice.replica, priority, b""))
        factor = 1.0 if bias is None else bias.factor(self._clock.now_s)
        return Prediction(factor * queue_s, factor * load_s, factor * prefill_s)

    def _wish(self, job: SimJob) -> Wish:
        slo = self._slos[job.tenant]
        on_overload = slo.on_overload
        if on_overload == "downgrade" and slo.ttft_s is None:
            on_overload = "reject"
        return Wish(
            ttft_s=slo.ttft_s,
            timeout_s=None,
            elapsed_s=self._clock.now_s - job.arrived_s,
            max_queue_s=self._max_queue_s,
            on_overload=on_overload,
        )


def _due(job: SimJob) -> float:
    return job.due_s
