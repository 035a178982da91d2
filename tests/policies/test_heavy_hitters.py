"""Bounded counting of what comes most often lately."""

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.heavy_hitters import HeavyHitters


def test_sums_decay() -> None:
    counts = HeavyHitters[str](4, horizon_s=10.0)
    counts.add("a", 2.0, now_s=0.0)
    counts.add("a", 1.0, now_s=10.0)
    assert counts.least("a", 10.0) == pytest.approx(1.0 + 2.0 / math.e)
    assert counts.least("b", 10.0) == 0.0


def test_a_steady_rate_is_found_whenever_it_began() -> None:
    counts = HeavyHitters[str](4, horizon_s=1.0)
    for tick in range(200_000, 203_000):  # far beyond where weights have to be rebased
        counts.add("old" if tick < 200_010 else "a", 1.0, now_s=tick / 10)
    assert counts.least("a", 20_300.0) == pytest.approx(9.5, rel=0.06)
    assert counts.least("old", 20_300.0) == pytest.approx(0.0, abs=1e-9)


@given(
    events=st.lists(st.tuples(st.integers(0, 20), st.floats(0, 300)), max_size=200),
    capacity=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_it_is_bounded_and_never_says_too_much(
    events: list[tuple[int, float]], capacity: int
) -> None:
    horizon_s = 2.0
    counts = HeavyHitters[int](capacity, horizon_s)
    true: Counter[int] = Counter()
    here: set[int] = set()
    now_s = 0.0
    exact = dict.fromkeys(range(21), 0.0)
    for key, pause_s in events:
        now_s += pause_s
        for other in exact:
            exact[other] *= math.exp(-pause_s / horizon_s)
        exact[key] += 1.0
        gone = counts.add(key, 1.0, now_s)
        here.add(key)
        here.discard(gone)
        true[key] += 1
        assert len(counts) == len(here) <= capacity
        assert all(other in counts for other in here)
        for other, amount in exact.items():
            assert counts.least(other, now_s) <= amount * (1 + 1e-9) + 1e-12
            if len(true) <= capacity:
                assert counts.least(other, now_s) == pytest.approx(amount, abs=1e-12)


def test_a_heavy_key_survives_a_flood_of_light_ones() -> None:
    counts = HeavyHitters[int](50, horizon_s=100.0)
    random = Random(1)
    for tick in range(5000):
        counts.add(-1 if random.random() < 0.1 else tick, 1.0, now_s=tick / 50)
    assert len(counts) == 50
    assert counts.least(-1, 100.0) > 250  # of about 316


@pytest.mark.parametrize(("capacity", "horizon_s"), [(0, 1.0), (1, 0.0)])
def test_nonsense_is_refused(capacity: int, horizon_s: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        HeavyHitters[int](capacity, horizon_s)
