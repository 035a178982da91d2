"""How two contenders differ in one metric, and whether that is more than noise.

A ratio is the geometric mean over the rounds in which both sides have the figure, each with the
other's of the same round; where a figure is a share of something, or was 0, it is a difference.
Intervals cover the true value with 95 % (Student's t over the rounds, on logarithms for ratios).

With ten metrics, far more than one in twenty comparisons of equals would find a "difference" in one
or another. So what is judged together is called different only where it is by Holm's procedure: a
false one is among them in at most 5 % of all cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Literal

from loadtest.metrics import METRICS
from loadtest.stats.pairs import FEWEST_PAIRS, Estimate, holm, mean_difference, mean_ratio
from loadtest.tables import number

ByRound = Mapping[int, float | None]
"""A contender's figure of each round that it was in; None where it has none."""

_ALPHA = 0.05
_TRIFLE, _TRIFLE_POINTS = 0.01, 0.5
"""A difference that is surely smaller matters to nobody."""


class Judgement(StrEnum):
    """Of a contender in a metric. `NONE`: no difference that so many rounds can show."""

    BETTER = "better"
    WORSE = "worse"
    NONE = "no difference shown"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Difference:
    """How `contender` stands to `against` in one metric. The medians are each one's own.

    `estimate` is how many times (`ratio`), or by how much more (`difference`), the contender has;
    None if no round has it of both. `p` counts as one among all that it is judged with.
    """

    metric: str
    contender: str
    against: str
    median: float | None
    median_against: float | None
    scale: Literal["ratio", "difference"]
    estimate: Estimate | None
    p: float | None = None
    judgement: Judgement = Judgement.UNKNOWN

    @property
    def noise(self) -> bool:
        """Whether the interval leaves room for no difference at all."""
        found = self.estimate
        if found is None or found.low is None or found.high is None:
            return True
        return found.low <= self.no_difference <= found.high

    @property
    def trifle(self) -> bool:
        """Whether a difference, if there is one, is surely below a hundredth of the other's, or for
        shares below half a point."""
        found = self.estimate
        if found is None or found.low is None or found.high is None:
            return False
        if self.scale == "ratio":
            return found.low >= 1 - _TRIFLE and found.high <= 1 + _TRIFLE
        most = _TRIFLE_POINTS
        return METRICS[self.metric].unit == "%" and found.low >= -most and found.high <= most

    @property
    def gap(self) -> float | None:
        """Between the medians; None unless both are known."""
        if self.median is None or self.median_against is None:
            return None
        return self.median - self.median_against

    @property
    def no_difference(self) -> float:
        """What the estimate would be if there were none."""
        return 1.0 if self.scale == "ratio" else 0.0

    def __str__(self) -> str:
        """The sentence that says so."""
        found, whose = self.estimate, f"{self.contender}'s {self.metric}"
        if found is None:
            return f"{whose}: not known in any round beside {self.against}'s"
        if found.low is None or found.high is None:
            has = f"{found.pairs} round{'s' if found.pairs > 1 else ''}"
            return f"{whose}: {has} of both, at least {FEWEST_PAIRS} give an interval"
        if found.low == found.high == self.no_difference:
            return f"{whose} is the same as {self.against}'s in all {found.pairs} rounds"
        if self.trifle:
            within = "1 %" if self.scale == "ratio" else "half a point"
            return f"{whose} is within {within} of {self.against}'s: {self.interval()}"
        if self.judgement is Judgement.NONE:
            room = self.interval()
            shown = f"no difference from {self.against}'s that {found.pairs} rounds can show"
            chance = "" if self.noise else ", which among so many metrics may be chance"
            return f"{whose}: {shown}: {room}{chance}"
        lower = found.value < self.no_difference
        value, *ends = found.value, found.low, found.high
        if lower:
            value, *ends = (1 / one if self.scale == "ratio" else -one for one in (value, *ends))
        low, high = sorted(ends)
        size = f"{number(value)}{self._measure()}"
        size += f" {'lower' if lower else 'higher'} ({number(low)}–{number(high)})"
        return f"{whose} is {size} than {self.against}'s: {self.judgement}"

    def interval(self) -> str:
        """From where to where it may lie; "–" without an interval."""
        found = self.estimate
        if found is None or found.low is None or found.high is None:
            return number(None)
        if self.scale == "ratio":
            return f"{number(found.low)}–{number(found.high)}×"
        return f"{_signed(found.low)} to {_signed(found.high)}{self._measure()}"

    def cell(self) -> str:
        """For a table: the estimate, its interval and the judgement."""
        found = self.estimate
        if found is None:
            return number(None)
        if self.scale == "ratio":
            value = f"{number(found.value)}×"
        else:
            value = f"{_signed(found.value)}{self._measure()}"
        if found.low is None:
            return value
        judged = "noise" if self.judgement is Judgement.NONE else self.judgement.value
        judged = "same" if self.trifle else judged
        room = self.interval().removesuffix("×").removesuffix(self._measure())
        return f"{value} ({room}) {judged}"

    def _measure(self) -> str:
        if self.scale == "ratio":
            return "×"
        unit = METRICS[self.metric].unit
        return " points" if unit == "%" else f" {unit}"


def difference(
    metric: str, contender: str, against: str, figures: ByRound, beside: ByRound
) -> Difference:
    """How `contender`, which has `figures`, stands to `against`, which has those `beside`; not
    judged yet."""
    pairs = [
        (before, after)
        for round_number, before in beside.items()
        if before is not None and (after := figures.get(round_number)) is not None
    ]
    # A goodput of 0 has no ratio to anything.
    ratio = not METRICS[metric].share and all(one > 0 for pair in pairs for one in pair)
    return Difference(
        metric,
        contender,
        against,
        _median(figures.values()),
        _median(beside.values()),
        "ratio" if ratio else "difference",
        mean_ratio(pairs) if ratio else mean_difference(pairs),
    )


def judged(differences: Sequence[Difference]) -> list[Difference]:
    """The same, judged all together. What has no interval stays unknown."""
    tested = [place for place, one in enumerate(differences) if _p(one) is not None]
    p_values = holm([_p(differences[place]) or 0.0 for place in tested])
    found = list(differences)
    for place, p in zip(tested, p_values, strict=True):
        found[place] = replace(found[place], p=p, judgement=_judgement(found[place], p))
    return found


def _p(one: Difference) -> float | None:
    return None if one.estimate is None else one.estimate.p


def _judgement(one: Difference, p: float) -> Judgement:
    if p >= _ALPHA or one.estimate is None or one.trifle:
        return Judgement.NONE
    more = one.estimate.value > one.no_difference
    better = more == METRICS[one.metric].higher_is_better
    return Judgement.BETTER if better else Judgement.WORSE


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{number(value)}"
