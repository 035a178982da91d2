"""Percentiles and means of worked numbers."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.stats.distribution import Distribution, percentile

FAST_BUT_FOR_ONE_MS = [100.0] * 9 + [3000.0]


def test_one_slow_request_of_ten_moves_the_mean_and_not_the_median() -> None:
    found = Distribution.of(FAST_BUT_FOR_ONE_MS)

    assert found is not None
    assert (found.count, found.mean, found.min, found.max) == (10, 390, 100, 3000)
    assert (found.p50, found.p90) == (100, pytest.approx(100 + 0.1 * 2900))
    # Of nine intervals, 0.95 and 0.99 end 0.55 and 0.91 of the way through the last one.
    assert found.p95 == pytest.approx(100 + 0.55 * 2900)
    assert found.p99 == pytest.approx(100 + 0.91 * 2900)


def test_values_are_taken_in_any_order_and_from_any_iterable() -> None:
    backwards = list(reversed(FAST_BUT_FOR_ONE_MS))

    assert Distribution.of(iter(backwards)) == Distribution.of(FAST_BUT_FOR_ONE_MS)
    assert Distribution.of(np.array(backwards)) == Distribution.of(FAST_BUT_FOR_ONE_MS)
    assert percentile(backwards, 0.5) == 100


def test_an_array_that_is_summed_up_keeps_its_order() -> None:
    values = np.array([3.0, 1.0, 2.0])

    Distribution.of(values)

    assert values.tolist() == [3.0, 1.0, 2.0]


def test_nothing_has_no_distribution() -> None:
    assert Distribution.of([]) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=30))
def test_it_agrees_with_numpy_and_its_figures_are_in_order(values: list[float]) -> None:
    found = Distribution.of(values)

    assert found is not None
    assert found.mean == pytest.approx(fmean(values))
    assert found.min <= found.mean <= found.max
    assert found.p95 == pytest.approx(np.percentile(values, 95))
    slack = 1e-9 * found.max
    in_order = [found.min, found.p50, found.p90, found.p95, found.p99, found.max]
    assert all(low <= high + slack for low, high in pairwise(in_order))
