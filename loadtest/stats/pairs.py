"""What pairs of figures say about the difference between two sides.

The two figures of a pair were measured one right after the other, so that what drifts moves both
and falls out of their ratio or difference. Those of all pairs are taken for independent and
normally distributed (ratios: their logarithms are, for a factor has no favourite side): then their
mean has Student's t distribution, which is true for few pairs and, whatever the distribution, ever
better for more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from loadtest.stats import student

FEWEST_PAIRS = 3
"""Two pairs have one degree of freedom, whose 95 % interval is 18 deviations wide: it would be a
figure without a meaning."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean over `pairs` pairs, its interval, and `p`: the probability of a mean at least as far
    from "no difference" if there is none. Interval and p are None with fewer than FEWEST_PAIRS."""

    value: float
    low: float | None
    high: float | None
    p: float | None
    pairs: int


def mean_difference(
    pairs: Sequence[tuple[float, float]], confidence: float = 0.95
) -> Estimate | None:
    """By how much the second of a pair is larger than the first, on average; None for no pairs."""
    return _mean([second - first for first, second in pairs], confidence)


def mean_ratio(pairs: Sequence[tuple[float, float]], confidence: float = 0.95) -> Estimate | None:
    """How many times the first of a pair the second is: the geometric mean, and its interval from
    the logarithms; None for no pairs. Raises ValueError for a figure that is not above 0."""
    if any(first <= 0 or second <= 0 for first, second in pairs):
        raise ValueError("a ratio needs figures above 0")
    found = _mean([math.log(second / first) for first, second in pairs], confidence)
    if found is None:
        return None
    return replace(
        found,
        value=math.exp(found.value),
        low=None if found.low is None else math.exp(found.low),
        high=None if found.high is None else math.exp(found.high),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p as it counts among all: if those below 0.05 are called differences, a false one is
    among them in at most 5 % of all cases (S. Holm, "A Simple Sequentially Rejective Multiple Test
    Procedure", Scandinavian Journal of Statistics 6, 1979)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted = [1.0] * len(p_values)
    least = 0.0
    for place, index in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = least
    return adjusted


def _mean(values: Sequence[float], confidence: float) -> Estimate | None:
    if not values:
        return None
    mean, count = fmean(values), len(values)
    if count < FEWEST_PAIRS:
        return Estimate(mean, None, None, None, count)
    error = stdev(values) / math.sqrt(count)
    reach = student.quantile(confidence, count - 1) * error
    if error == 0:  # Every pair says the same, as those of a simulation without noise do.
        return Estimate(mean, mean, mean, 1.0 if mean == 0 else 0.0, count)
    p = student.two_sided_p(mean / error, count - 1)
    return Estimate(mean, mean - reach, mean + reach, p, count)
