"""From values to places on an axis, and where its ticks are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_CLOCK_STEPS_S = (
    *(base * 10.0**power for power in range(-3, 1) for base in (1.0, 2.0, 5.0)),
    *(10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0),
    *(hours * 3600.0 for hours in (1, 2, 3, 6, 12, 24, 48, 120, 240)),
)
_LOG_FROM = 15.0
_ABOVE = 1.04
_SAME = 1e-6


class Scale(Protocol):
    """An axis. Values outside of it are drawn at its nearer end."""

    @property
    def low(self) -> float:
        """The value at its beginning."""

    @property
    def high(self) -> float:
        """The value at its end."""

    @property
    def ticks(self) -> tuple[float, ...]:
        """The values that get a tick, from low to high."""

    def at(self, value: float) -> float:
        """The place of a value: 0 is the axis' beginning, 1 its end."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Equal steps are equally long."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


@dataclass(frozen=True, slots=True)
class Log:
    """Equal ratios are equally long. Both ends are above 0."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        if value <= self.low:
            return 0.0
        return min(1.0, math.log(value / self.low) / math.log(self.high / self.low))


def linear(low: float, high: float, *, ticks: int = 5) -> Linear:
    """From `low` to `high` exactly, with about `ticks` ticks between them whose steps are 1, 2, 2.5
    or 5 times a power of ten. Ends that are as good as equal are moved apart."""
    if high <= low or math.isclose(low, high, rel_tol=_SAME):
        low, high = (0.0, 1.0) if high == low == 0 else (low - abs(low) / 2, low + abs(low) / 2)
    step = _step((high - low) / max(1, ticks))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Linear(low, high, tuple(_round(n * step) for n in range(first, last + 1)))


def from_zero(values: Iterable[float], *, ticks: int = 4) -> Linear:
    """From 0 to a little above the largest of the values."""
    return linear(0.0, max(values, default=0.0) * _ABOVE or 1.0, ticks=ticks)


def clock(end_s: float, *, ticks: int = 5) -> Linear:
    """From 0 to exactly `end_s`, with ticks at seconds, minutes or hours that people count in."""
    end_s = end_s if end_s > 0 else 1.0
    wanted = end_s / max(1, ticks - 1)
    step = next((each for each in _CLOCK_STEPS_S if each >= wanted), _step(wanted))
    return Linear(0.0, end_s, tuple(_round(n * step) for n in range(int(end_s / step + 1e-9) + 1)))


def log(low: float, high: float, *, ticks: int = 6) -> Log:
    """From `low` to `high`, both above 0, with ticks at 1, 2 and 5 times powers of ten; only at
    powers of ten, or at some of them, where that would be more than `ticks`."""
    if not 0 < low < high:
        raise ValueError(f"a logarithmic axis runs from above 0 upwards, not {low} to {high}")
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for bases, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3), ((1,), 5)):
        places = tuple(
            _round(base * 10.0**power)
            for power in powers
            if power % every == 0
            for base in bases
            if low * 0.999 <= base * 10.0**power <= high * 1.001
        )
        if len(places) <= ticks:
            break
    return Log(low, high, places)


def fitting(values: Iterable[float]) -> Linear | Log:
    """For at least one value. Logarithmic where they spread over more than an order of magnitude,
    with ends a little outside of them; else linear, from 0 unless they lie close together."""
    found = list(values)
    low, high = min(found), max(found)
    if math.isclose(low, high, rel_tol=_SAME):
        return linear(low, high)
    if low > 0 and high / low > _LOG_FROM:
        return log(low * 0.9, high * 1.1)
    return linear(0.0 if 0 <= low < high / 2 else low, high * _ABOVE if high > 0 else high)


def _step(wanted: float) -> float:
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(base * power for base in _STEPS if base * power >= wanted * (1 - 1e-9))


def _round(value: float) -> float:
    """Without the last digits' noise, which would show in a label."""
    return float(f"{value:.10g}")
