"""Quantiles from bins, against those of the values themselves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.slo.sketch import RELATIVE_ERROR, Sketch, quantiles


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=80), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_every_quantile_is_within_its_error(values: list[float], share: float) -> None:
    parts = [Sketch(), Sketch(), Sketch()]
    for index, value in enumerate(values):
        parts[index % 2].add(value)
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert quantiles(parts, [share]) == [pytest.approx(exact, rel=RELATIVE_ERROR + 1e-9)]


def test_of_nothing_there_are_none() -> None:
    assert quantiles([], [0.5]) is None
    assert quantiles([Sketch()], [0.5]) is None


def test_whatever_comes_takes_a_bounded_number_of_bins() -> None:
    sketch = Sketch()
    for power in range(-200, 200):
        for part in range(10):
            sketch.add((1 + part / 10) * 10.0**power if power < 300 else 0.0)
    sketch.add(0.0)
    assert len(sketch.counts) <= 235
