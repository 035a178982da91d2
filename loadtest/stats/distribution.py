"""What a set of measured values looks like."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, interpolated linearly between
    neighbours. Raises ValueError for no values or a share outside."""
    if not len(values) or not 0 <= share <= 1:
        raise ValueError("a percentile needs values and a share from 0 to 1")
    return _interpolated(np.sort(_floats(values)), share)


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a set of measured times looks like, all in one unit."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """None for no values. Arrays of numpy are taken as they are."""
        ordered = np.sort(_floats(values))
        if not ordered.size:
            return None
        low, high = float(ordered[0]), float(ordered[-1])
        # Rounding may put the mean of equal values just beside them.
        mean = min(max(float(ordered.mean()), low), high)
        p50, p90, p95, p99 = (_interpolated(ordered, share) for share in (0.5, 0.9, 0.95, 0.99))
        return cls(ordered.size, mean, low, p50, p90, p95, p99, high)


def _floats(values: Iterable[float]) -> NDArray[np.float64]:
    if isinstance(values, np.ndarray):
        return values.astype(np.float64, copy=False)
    return np.fromiter(values, np.float64)


def _interpolated(ordered: NDArray[np.float64], share: float) -> float:
    place = share * (ordered.size - 1)
    low = math.floor(place)
    below, above = float(ordered[low]), float(ordered[min(low + 1, ordered.size - 1)])
    return below + (above - below) * (place - low)
