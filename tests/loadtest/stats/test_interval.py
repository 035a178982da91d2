"""Intervals: known ones, and whether they hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.stats.interval import Interval, bootstrap, wilson


def test_wilson_of_known_numbers() -> None:
    # Half of ten: 0.5 -+ 1.96 / (1 + 1.96^2 / 10) * sqrt(0.025 + 1.96^2 / 400).
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    # None of ten: the upper bound is z^2 / (n + z^2).
    assert wilson(0, 10) == pytest.approx((0.0, 3.8415 / 13.8415), abs=1e-4)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2000), st.floats(0, 1), st.sampled_from([0.5, 0.95, 0.999]))
def test_wilson_holds_the_share_within_0_and_1_and_mirrors(
    trials: int, share: float, confidence: float
) -> None:
    successes = round(share * trials)
    found = wilson(successes, trials, confidence)
    mirrored = wilson(trials - successes, trials, confidence)

    assert 0 <= found.low < found.high <= 1
    assert found.holds(successes / trials)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx(found, abs=1e-9)


def test_wilson_covers_the_true_share_as_often_as_it_says() -> None:
    generator = np.random.default_rng(3)
    found = [wilson(int(hits), 60).holds(0.93) for hits in generator.binomial(60, 0.93, 2000)]

    assert 0.93 <= np.mean(found) <= 0.98


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (3, 2), (-1, 2)])
def test_no_share_has_no_interval(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="give no share"):
        wilson(successes, trials)


@pytest.mark.parametrize("confidence", [0.0, 1.0, -1.0, 95.0])
def test_a_confidence_is_a_share(confidence: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        wilson(1, 2, confidence)
    with pytest.raises(ValueError, match="between 0 and 1"):
        bootstrap([1.0], confidence=confidence)


def test_a_bootstrap_is_repeatable_and_holds_the_statistic() -> None:
    values = np.random.default_rng(5).exponential(100.0, 200)
    of_mean, of_median = bootstrap(values, "mean"), bootstrap(values, "median")

    assert of_mean == bootstrap(values, "mean")
    assert of_mean != bootstrap(values, "mean", seed=1)
    assert of_mean.holds(float(values.mean()))
    assert of_median.holds(float(np.median(values)))
    # Near normal theory: 1.96 standard errors to either side.
    width = 2 * 1.96 * values.std() / np.sqrt(200)
    assert of_mean.high - of_mean.low == pytest.approx(width, rel=0.1)


def test_a_bootstrap_covers_the_true_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(7)
    found = [
        bootstrap(generator.normal(10, 2, 40), "mean", resamples=300, seed=seed).holds(10)
        for seed in range(200)
    ]

    assert 0.88 <= np.mean(found) <= 0.99


def test_equal_values_leave_no_doubt() -> None:
    assert bootstrap([2.0, 2.0, 2.0]) == Interval(2.0, 2.0)


def test_memory_does_not_grow_with_the_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    values = list(range(50))
    at_once = bootstrap(values, "mean", resamples=101)
    monkeypatch.setattr("loadtest.stats.interval._VALUES_AT_ONCE", 120)

    assert bootstrap(values, "mean", resamples=101) == at_once


def test_nothing_has_no_interval() -> None:
    with pytest.raises(ValueError, match="needs values"):
        bootstrap([])
