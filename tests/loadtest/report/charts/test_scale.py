"""Where values and ticks stand on an axis."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.report.charts.scale import Linear, Log, clock, fitting, from_zero, linear, log

POSITIVE = st.floats(1e-6, 1e9)


def test_linear_ticks_are_round() -> None:
    assert linear(0, 1).ticks == (0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert linear(0.85, 1).ticks == (0.85, 0.9, 0.95, 1.0)
    assert linear(0, 97).ticks == (0, 20, 40, 60, 80)
    assert linear(-3, 3).at(0) == 0.5


def test_logarithmic_ticks_thin_out() -> None:
    assert log(10, 100).ticks == (10, 20, 50, 100)
    assert log(10, 10_000).ticks == (10, 100, 1000, 10_000)
    assert log(1, 1e9).ticks == (1, 100, 10_000, 1e6, 1e8)
    assert log(1, 100).at(10) == pytest.approx(0.5)


def test_a_logarithmic_axis_needs_values_above_0() -> None:
    for low, high in ((0, 1), (-1, 1), (2, 2), (3, 2)):
        with pytest.raises(ValueError, match="logarithmic"):
            log(low, high)


def test_time_is_counted_as_people_do() -> None:
    assert clock(100).ticks == (0, 30, 60, 90)
    assert clock(325).ticks == (0, 120, 240)
    assert clock(7200).ticks == (0, 1800, 3600, 5400, 7200)
    assert clock(0).high == 1.0


def test_wide_values_are_logarithmic_and_close_ones_linear() -> None:
    assert isinstance(fitting([1, 100]), Log)
    assert isinstance(fitting([50, 100]), Linear)
    assert fitting([10, 100]).low == 0
    assert isinstance(fitting([0, 100]), Linear)
    assert fitting([5, 5]).at(5) > 0


@given(low=POSITIVE, high=POSITIVE)
@settings(max_examples=50, deadline=None)
def test_every_axis_has_its_values_and_few_ticks_within(low: float, high: float) -> None:
    low, high = sorted((low, high))
    for scale in (fitting([low, high]), from_zero([low, high]), linear(low, high), clock(high)):
        assert 0 <= scale.at(low) <= scale.at(high) <= 1
        assert len(scale.ticks) <= 12
        assert all(before < after for before, after in pairwise(scale.ticks))
        slack = 0.01 * (scale.high - scale.low)
        assert all(scale.low - slack <= each <= scale.high + slack for each in scale.ticks)
