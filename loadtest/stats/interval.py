"""How sure a figure is: intervals that would cover the true value in so many of a hundred runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

Statistic = Literal["mean", "median"]

_VALUES_AT_ONCE = 1 << 20
"""Drawn values that are held in memory: 8 MiB, and as much for their places."""


class Interval(NamedTuple):
    """From `low` to `high`, both included."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether the value lies within."""
        return self.low <= value <= self.high


def wilson(successes: float, trials: float, confidence: float = 0.95) -> Interval:
    """Where the true share of successes lies, by Wilson's score (E. B. Wilson, "Probable Inference,
    the Law of Succession, and Statistical Inference", JASA 22, 1927).

    It keeps within 0 and 1 and is of use for few trials, and for none or nothing but successes,
    where mean ± z·deviation has no width. Counts may be broken numbers, where trials that depend on
    each other are counted as fewer. Raises ValueError without trials.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials give no share")
    z = _two_sided_z(confidence)
    share = successes / trials
    weight = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / weight
    spread = share * (1 - share) / trials + z * z / (4 * trials * trials)
    reach = z / weight * math.sqrt(spread)
    # The bounds of no and of nothing but successes are exactly 0 and 1, up to rounding.
    low = 0.0 if successes == 0 else max(centre - reach, 0.0)
    high = 1.0 if successes == trials else min(centre + reach, 1.0)
    return Interval(low, high)


def bootstrap(
    values: Sequence[float],
    statistic: Statistic = "median",
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Where the true mean or median lies, by the percentile bootstrap (B. Efron, "Bootstrap
    Methods: Another Look at the Jackknife", Annals of Statistics 7, 1979): the statistic of
    `resamples` samples drawn from the values with replacement, without its outermost shares.

    The values have to be independent of each other. With fewer than about twenty of them it is
    somewhat too narrow. The same values and seed give the same interval; the time it takes grows
    with `resamples` times values. Raises ValueError for no values or a confidence outside 0 to 1.
    """
    if not len(values) or resamples < 1:
        raise ValueError("an interval needs values, and at least one resample")
    tail = (1 - _checked(confidence)) / 2
    sample = np.asarray(values, np.float64)
    generator = np.random.default_rng(seed)
    found = np.empty(resamples)
    rows = max(1, _VALUES_AT_ONCE // sample.size)
    for start in range(0, resamples, rows):
        part = found[start : start + rows]
        drawn = sample[generator.integers(sample.size, size=(part.size, sample.size))]
        part[:] = drawn.mean(axis=1) if statistic == "mean" else np.median(drawn, axis=1)
    low, high = np.quantile(found, (tail, 1 - tail))
    return Interval(float(low), float(high))


def _two_sided_z(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + _checked(confidence)) / 2)


def _checked(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, not at {confidence:g}")
    return confidence
