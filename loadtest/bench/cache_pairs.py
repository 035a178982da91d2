"""The ratio of two servers over paired runs, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from loadtest.bench.cells import Cell
from loadtest.bench.measure import Repetition


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """First over second: the geometric mean over `pairs`, and its 95 % confidence interval."""

    ratio: float
    low: float
    high: float
    pairs: int


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> PairedRatio:
    """From figures that were measured in pairs, all above zero.

    Student's interval on the logarithms of the ratios: what slows the machine for a while slows
    both sides of a pair and falls out. Raises ValueError for fewer than two pairs.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"{len(first)} and {len(second)} figures are not two pairs or more")
    logs = [math.log(one / other) for one, other in zip(first, second, strict=True)]
    centre = fmean(logs)
    half = student_t(0.975, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return PairedRatio(
        math.exp(centre), math.exp(centre - half), math.exp(centre + half), len(logs)
    )


def cell_ratio(
    cell: Cell, first: Sequence[Repetition], second: Sequence[Repetition]
) -> PairedRatio | None:
    """One cell's ratio over repetitions that ran in pairs; None unless two pairs have it."""
    pairs = [
        (mine, theirs)
        for left, right in zip(first, second, strict=True)
        if (mine := cell.value(left)) and (theirs := cell.value(right))
    ]
    if len(pairs) < 2:
        return None
    return paired_ratio([mine for mine, _ in pairs], [theirs for _, theirs in pairs])


def student_t(share: float, freedom: int) -> float:
    """Student's t below which `share` (above a half) lies, for `freedom` degrees of freedom.

    Exact for one and two degrees, otherwise Cornish and Fisher's expansion around the normal
    quantile (Abramowitz and Stegun 26.7.5): 0.2 % off at three degrees, less with more.
    """
    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        return (2 * share - 1) * math.sqrt(2 / (4 * share * (1 - share)))
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    corrections = (term / freedom**power for power, term in enumerate(terms, start=1))
    return math.fsum((z, *corrections))
