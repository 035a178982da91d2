"""Means over pairs: worked numbers, how often intervals cover, and many of them at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.stats.pairs import holm, mean_difference, mean_ratio


def test_a_difference_worked_by_hand() -> None:
    # 1, 2, 3 and 6 more: mean 3, deviation 2.160, t of 3 degrees 3.182, 3.182 · 2.160 / 2 = 3.437.
    found = mean_difference([(10, 11), (10, 12), (10, 13), (10, 16)])

    assert found is not None
    assert (found.value, found.pairs) == (3.0, 4)
    assert found.low == pytest.approx(3 - 3.437, abs=1e-3)
    assert found.high == pytest.approx(3 + 3.437, abs=1e-3)
    # t = 3 / 1.080 = 2.777 with 3 degrees of freedom.
    assert found.p == pytest.approx(0.0692, abs=1e-3)


def test_a_ratio_has_no_favourite_side() -> None:
    pairs = [(100.0, 140.0), (90.0, 130.0), (120.0, 150.0), (80.0, 125.0)]
    there, back = mean_ratio(pairs), mean_ratio([(second, first) for first, second in pairs])

    assert there is not None
    assert back is not None
    assert there.low is not None
    assert back.high is not None
    assert there.value == pytest.approx((1.4 * 13 / 9 * 1.25 * 1.5625) ** 0.25)
    assert there.value * back.value == pytest.approx(1.0)
    assert there.low * back.high == pytest.approx(1.0)
    assert there.p == pytest.approx(back.p)


def test_few_pairs_have_a_mean_and_no_interval() -> None:
    found = mean_ratio([(1.0, 4.0), (1.0, 1.0)])

    assert found is not None
    assert found.value == pytest.approx(2.0)
    assert (found.low, found.high, found.p, found.pairs) == (None, None, None, 2)
    assert mean_ratio([]) is None
    assert mean_difference([]) is None


def test_pairs_that_all_say_the_same_leave_no_doubt() -> None:
    same, other = mean_difference([(2.0, 2.0)] * 3), mean_difference([(2.0, 2.5)] * 3)

    assert same is not None
    assert other is not None
    assert (same.low, same.high, same.p) == (0.0, 0.0, 1.0)
    assert (other.low, other.high, other.p) == (0.5, 0.5, 0.0)


def test_what_is_not_above_0_has_no_ratio() -> None:
    with pytest.raises(ValueError, match="above 0"):
        mean_ratio([(1.0, 2.0), (0.0, 2.0), (1.0, 2.0)])


@pytest.mark.parametrize("rounds", [3, 5])
def test_intervals_cover_the_true_ratio_as_often_as_they_say(rounds: int) -> None:
    random, trials, covered = np.random.default_rng(7), 600, 0
    for _ in range(trials):
        before = 100 * np.exp(random.normal(0, 0.1, rounds))  # drift, which both of a pair share
        after = before * 1.2 * np.exp(random.normal(0, 0.05, rounds))
        found = mean_ratio(list(zip(before.tolist(), after.tolist(), strict=True)))
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1.2 <= found.high

    # Three deviations of a share of 0.95 in 600 are 0.027.
    assert covered / trials == pytest.approx(0.95, abs=0.027)


def test_holm_worked_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.5, 0.9]) == [1.0, 1.0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lets_nothing_pass_that_bonferroni_holds_and_keeps_the_order(p: list[float]) -> None:
    adjusted = holm(p)

    for one, before in zip(adjusted, p, strict=True):
        assert before <= one <= min(1.0, len(p) * before) or math.isclose(one, len(p) * before)
    by_p = [one for _, one in sorted(zip(p, adjusted, strict=True))]
    assert by_p == sorted(by_p)
