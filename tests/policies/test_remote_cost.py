"""What is learned of a server from the times of its answers."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.remote_cost import Line, RemoteCost

sizes = st.integers(0, 100_000)
times = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(sizes, times), max_size=60))
def test_whatever_is_observed_every_prediction_is_positive_and_finite(seen):
    cost = RemoteCost()
    for tokens, seconds in seen:
        cost.observe_first_token(tokens, 0, seconds)
        cost.observe_next_tokens(tokens, seconds)
    learned = cost.coefficients()
    assert learned.constant_s > 0
    assert learned.token_s > 0
    assert learned.sequence_s > 0
    assert math.isfinite(learned.prefill_s(1000, 0))


@settings(max_examples=30, deadline=None)
@given(
    st.floats(0.002, 0.5),
    st.floats(1e-6, 1e-3),
    st.integers(0, 1 << 30),
)
def test_a_server_is_learned_from_noisy_answers(constant_s, token_s, seed):
    random, cost = Random(seed), RemoteCost()
    for _ in range(150):
        uncached, pending = random.randrange(1, 4000), random.choice((0, 0, 4000))
        seconds = constant_s + token_s * (uncached + pending)
        cost.observe_first_token(uncached, pending, seconds * random.uniform(0.9, 1.1))
    for tokens in (1500, 4000, 8000):
        truth = constant_s + token_s * tokens
        learned = cost.coefficients()
        assert learned.constant_s + learned.token_s * tokens == pytest.approx(truth, rel=0.25)


def test_one_outlier_moves_little_and_a_change_is_believed():
    line = Line(0.03, 1e-4)
    for i in range(100):
        line.observe(i * 40, 0.05 + 2e-4 * i * 40)
    before = line.predict(1000)
    line.observe(1000, 500.0)
    assert line.predict(1000) == pytest.approx(before, rel=0.2)
    for i in range(100):
        line.observe(i * 40, 10 * (0.05 + 2e-4 * i * 40))
    assert line.predict(1000) == pytest.approx(2.5, rel=0.25)


@pytest.mark.parametrize("linear", [True, False])
def test_short_tails_say_nothing_of_what_a_cold_prompt_takes(linear):
    """On a GPU a few tokens take as long as one. Thousands of warm prompts in a row must not make
    it seem that a cold one does, too."""
    random, cost = Random(3), RemoteCost()

    def seconds(tokens: int) -> float:
        rising = tokens if linear else max(0, tokens - 200)
        return (0.02 + 2e-5 * rising) * random.uniform(0.9, 1.1)

    def observe(tokens: int) -> None:
        cost.observe_first_token(tokens, 0, seconds(tokens))

    for _ in range(40):
        observe(random.randrange(2000, 5000))
    for _ in range(3000):
        observe(random.randrange(1, 65))
    learned = cost.coefficients()
    assert learned.constant_s == pytest.approx(0.02, rel=0.1)
    assert learned.constant_s + learned.token_s * 4000 == pytest.approx(0.1, rel=0.2)


def test_more_work_is_never_predicted_to_take_less():
    line, random = Line(0.03, 1e-4), Random(1)
    for _ in range(200):
        line.observe(random.randrange(4000), random.uniform(0.01, 3))
        assert line.predict(2000) > line.predict(1000) > line.predict(0) > 0


def test_running_sequences_are_told_apart_from_the_first_token():
    cost = RemoteCost()
    for i in range(100):
        cost.observe_next_tokens(1 + i % 32, 0.01 + 0.001 * (1 + i % 32))
    assert cost.coefficients().sequence_s == pytest.approx(0.001, rel=0.1)
    assert cost.coefficients().token_s == pytest.approx(1e-4)


def test_a_prior_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        Line(0.0, 1.0)
