"""How values are distributed, in little room and to a known error."""

from __future__ import annotations

import math
from collections.abc import Iterable

RELATIVE_ERROR = 0.05
_RATIO = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_RATIO = math.log(_RATIO)
_LEAST, _MOST = 1e-5, 1e5


class Sketch:
    """Counts of values in bins that grow by a constant ratio: whatever quantile is asked for, the
    answer is within 5 % of a value that was added. Values are positive; below 10 µs and above 28 h,
    in seconds, they count as these. At most 230 bins.

    Masson, Rim, Lee: "DDSketch" (VLDB 2019), without its collapsing of bins.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, value: float) -> None:
        """One more."""
        at = math.ceil(math.log(min(_MOST, max(_LEAST, value))) / _LOG_RATIO)
        self.counts[at] = self.counts.get(at, 0) + 1


def quantiles(sketches: Iterable[Sketch], shares: Iterable[float]) -> list[float] | None:
    """Of all their values together, what each share of them does not exceed; None without any. May
    be called from any thread while values are added."""
    together: dict[int, int] = {}
    for sketch in sketches:
        for at, count in sketch.counts.copy().items():
            together[at] = together.get(at, 0) + count
    total = sum(together.values())
    if not total:
        return None
    bins = sorted(together.items())
    return [_value_at(bins, max(1, math.ceil(share * total))) for share in shares]


def _value_at(bins: list[tuple[int, int]], rank: int) -> float:
    seen, found = 0, bins[-1][0]
    for at, count in bins:
        seen += count
        if seen >= rank:
            found = at
            break
    return 2 * math.exp(found * _LOG_RATIO) / (_RATIO + 1)
