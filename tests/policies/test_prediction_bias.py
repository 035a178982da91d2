"""What predictions are multiplied by, from how they fared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.prediction_bias import PredictionBias


def test_nothing_is_corrected_before_anything_was_seen() -> None:
    assert PredictionBias().factor(1e9) == 1.0


def test_what_always_takes_twice_as_long_is_soon_predicted_so() -> None:
    bias = PredictionBias()
    for turn in range(40):
        bias.observe(1.0, 2.0, turn * 0.1)
    assert bias.factor(4.0) == pytest.approx(2.0, rel=0.05)


def test_one_surprise_moves_it_little() -> None:
    bias = PredictionBias()
    bias.observe(1.0, 2.0, 0.0)
    assert 1.0 < bias.factor(0.0) < 1.15


def test_a_few_milliseconds_are_no_matter_of_factors() -> None:
    bias = PredictionBias()
    for turn in range(100):
        bias.observe(0.001, 0.005, turn * 0.01)
    assert bias.factor(1.0) < 1.25


def test_it_is_forgotten_while_nothing_is_sent_there() -> None:
    bias = PredictionBias()
    for turn in range(100):
        bias.observe(1.0, 4.0, turn * 0.01)
    now, half, gone = (bias.factor(at_s) for at_s in (1.0, 31.0, 600.0))
    assert now == pytest.approx(4.0, rel=0.1)
    assert half == pytest.approx(now**0.5, rel=0.02)
    assert gone == pytest.approx(1.0, abs=0.01)


seconds = st.floats(0, 1e4)


@given(st.lists(st.tuples(seconds, seconds, st.floats(0, 60)), max_size=40), st.floats(0, 100))
@settings(max_examples=60, deadline=None)
def test_it_stays_within_its_bounds(seen: list[tuple[float, float, float]], later_s: float) -> None:
    bias, now_s = PredictionBias(), 0.0
    for predicted_s, actual_s, pause_s in seen:
        now_s += pause_s
        bias.observe(predicted_s, actual_s, now_s)
        assert 0.5 - 1e-9 <= bias.factor(now_s) <= 4.0 + 1e-9
    assert abs(bias.factor(now_s + later_s) - 1) <= abs(bias.factor(now_s) - 1) + 1e-9
