"""What a comparison found: every attempt, and how each contender stands to the first.

One of the metrics is the headline, chosen before, and judged by itself; the others are judged all
together. Each of the two errs in 5 % of all cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.difference import ByRound, Difference, Judgement, difference, judged
from loadtest.metrics import ERRORS, METRICS
from loadtest.tables import Table, number

DEFAULT_HEADLINE = "TTFT p95"
_ERRORS_APART = 1.0
"""Percentage points between two error shares from which on their other figures are of different
requests."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One contender in one round; rounds and the `place` in them count from 1. `values` has every
    metric. `failure` says in a line why it could not be run, `complaints` are the client's own."""

    contender: str
    round: int
    place: int
    seed: int
    values: dict[str, float | None]
    failure: str | None = None
    complaints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """All attempts, in the order they were made, and what they say about every contender but the
    first beside the first, metric by metric."""

    contenders: tuple[str, ...]
    seed: int
    headline: str
    attempts: tuple[Attempt, ...]
    differences: tuple[Difference, ...]

    @classmethod
    def of(
        cls, contenders: Sequence[str], attempts: Sequence[Attempt], *, seed: int, headline: str
    ) -> Comparison:
        """Judge the attempts. Metrics that nobody has are left out."""

        def by_round(metric: str, contender: str) -> ByRound:
            mine = [one for one in attempts if one.contender == contender]
            return {one.round: one.values[metric] for one in mine}

        first, *others = contenders
        found = [
            difference(name, other, first, by_round(name, other), by_round(name, first))
            for name in METRICS
            if any(one.values[name] is not None for one in attempts)
            for other in others
        ]
        main = judged([one for one in found if one.metric == headline])
        rest = judged([one for one in found if one.metric != headline])
        return cls(tuple(contenders), seed, headline, tuple(attempts), (*main, *rest))

    @property
    def rounds(self) -> int:
        """How many there were."""
        return max((one.round for one in self.attempts), default=0)

    def lines(self) -> list[str]:
        """The headline first; then what else differs, what does not, and what to know beside it."""
        main = [one for one in self.differences if one.metric == self.headline]
        rest = [one for one in self.differences if one.metric != self.headline]
        lines = [str(one) for one in main] or [f"{self.headline}: no contender has it"]
        shown = (Judgement.BETTER, Judgement.WORSE)
        lines += [str(one) for one in rest if one.judgement in shown]
        lines += [str(one) for one in rest if one.judgement not in shown]
        return [*lines, *self._cautions(), self._method()]

    def table(self) -> Table:
        """A row for each metric: the contenders' medians, and how each stands to the first."""
        first, *others = self.contenders
        headers = ("metric", *self.contenders, *(f"{other} to {first}" for other in others))
        by_metric: dict[str, list[Difference]] = {}
        for one in self.differences:
            by_metric.setdefault(one.metric, []).append(one)
        rows = []
        for name, beside in by_metric.items():
            medians = [beside[0].median_against, *(one.median for one in beside)]
            cells = [*map(number, medians), *(one.cell() for one in beside)]
            rows.append((f"{name} {METRICS[name].unit}", *cells))
        return Table(headers, tuple(rows))

    def _cautions(self) -> list[str]:
        lines = [
            f"{one.contender} could not be run in round {one.round}: {one.failure}"
            for one in self.attempts
            if one.failure is not None
        ]
        lines += [
            f"{number(one.median)} % of {one.contender}'s requests failed and "
            f"{number(one.median_against)} % of {one.against}'s: their times are of those answered"
            for one in self.differences
            if one.metric == ERRORS and abs(one.gap or 0.0) > _ERRORS_APART
        ]
        lines += [
            f"{one.contender}, round {one.round}: {complaint}"
            for one in self.attempts
            for complaint in one.complaints
        ]
        return lines

    def _method(self) -> str:
        rest = {one.metric for one in self.differences if one.metric != self.headline}
        return (
            f"{self.rounds} rounds, each with all contenders and a seed of its own; in brackets "
            f"where the true value lies with 95 %; {self.headline} was chosen before, the other "
            f"{len(rest)} metrics are judged all together (Holm)"
        )
