"""Predictions of time: their shape, and how they follow what is observed."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cost import CostModel, StepShape

TRUE = {
    "constant_s": 5e-3,
    "token_s": 250e-6,
    "sequence_s": 300e-6,
    "attended_s": 0.2e-6,
    "context_read_s": 1e-6,
}


def model() -> CostModel:
    return CostModel(
        token_flops=0.27e9, weight_bytes=269e6, kv_token_bytes=23040, block_bytes=368640
    )


def true_s(shape: StepShape, slowdown: float = 1.0) -> float:
    features = (1, shape.tokens, shape.sequences, shape.attended, shape.context_read)
    return slowdown * sum(a * b for a, b in zip(TRUE.values(), features, strict=True))


def prefill(tokens: int, cached: int) -> StepShape:
    return StepShape(tokens, 1, tokens * cached + tokens * (tokens + 1) // 2, tokens + cached)


def decode(contexts: list[int]) -> StepShape:
    return StepShape(len(contexts), len(contexts), sum(contexts), sum(contexts))


def any_shape(rng: random.Random) -> StepShape:
    if rng.random() < 0.3:
        return prefill(rng.randint(16, 256), rng.randint(0, 1500))
    return decode([rng.randint(10, 2000) for _ in range(rng.randint(1, 16))])


def trained(steps: int = 300, noise: float = 0.0, seed: int = 1) -> tuple[CostModel, random.Random]:
    rng = random.Random(seed)
    cost = model()
    for _ in range(steps):
        shape = any_shape(rng)
        cost.observe_step(shape, true_s(shape) * math.exp(rng.gauss(0, noise)))
    return cost, rng


def errors(cost: CostModel, rng: random.Random, slowdown: float = 1.0) -> list[float]:
    shapes = [any_shape(rng) for _ in range(200)]
    return [abs(cost.step_s(shape) / true_s(shape, slowdown) - 1) for shape in shapes]


steps_seen = st.lists(
    st.tuples(st.integers(1, 256), st.integers(0, 2000), st.booleans(), st.floats(1e-6, 10)),
    max_size=30,
)


def after(seen: list[tuple[int, int, bool, float]]) -> CostModel:
    cost = model()
    for tokens, context, is_prefill, seconds in seen:
        shape = prefill(tokens, context) if is_prefill else decode([context + 1] * min(tokens, 16))
        cost.observe_step(shape, seconds)
        cost.observe_load("redis" if is_prefill else "dram", tokens, seconds)
    return cost


@settings(max_examples=60, deadline=None)
@given(steps_seen, st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 500))
def test_more_work_never_takes_less_time_whatever_was_observed(seen, tokens, context, more):
    cost = after(seen)
    shape = StepShape(tokens, 3, context, context)
    assert cost.step_s(shape) > 0
    for field in ("tokens", "sequences", "attended", "context_read"):
        larger = replace(shape, **{field: getattr(shape, field) + more})
        assert cost.step_s(larger) > cost.step_s(shape)
    assert cost.prefill_s(tokens + more, context) > cost.prefill_s(tokens, context)
    assert cost.prefill_s(tokens, context + more) > cost.prefill_s(tokens, context)
    in_steps, at_once = cost.coefficients(more, 16), cost.coefficients(tokens, 16)
    assert in_steps.prefill_s(tokens, context) >= at_once.prefill_s(tokens, context)
    assert cost.decode_step_s(tokens + more, context) > cost.decode_step_s(tokens, context)
    assert cost.decode_step_s(tokens, context + more) > cost.decode_step_s(tokens, context)
    assert cost.saving_s(context + more, 16) > cost.saving_s(context, 16) > 0
    assert cost.saving_s(context, 16 + more) > cost.saving_s(context, 16)
    for tier in ("dram", "redis"):
        assert cost.load_s(tier, tokens + more) > cost.load_s(tier, tokens) > 0
    assert all(math.isfinite(value) for value in cost.snapshot().values())


def test_a_prefill_is_the_sum_of_its_steps():
    cost, _ = trained()
    parts = [cost.step_s(prefill(n, 100 + before)) for before, n in ((0, 64), (64, 64), (128, 22))]
    in_steps = CostModel.given(cost.coefficients(64, 16))
    assert in_steps.prefill_s(150, 100) == pytest.approx(sum(parts))
    assert in_steps.prefill_s(128, 100) == pytest.approx(sum(parts[:2]))
    assert in_steps.prefill_s(0, 100) == 0


def test_a_block_saves_what_a_prefill_without_it_takes_less_but_for_the_step():
    cost, _ = trained()
    whole = cost.step_s(prefill(64, 0)) - cost.step_s(prefill(48, 16))
    assert cost.saving_s(0, 16) == pytest.approx(whole)


def test_coefficients_are_recovered():
    cost, _ = trained(400)
    learned = cost.snapshot()
    for name, value in TRUE.items():
        assert learned[name] == pytest.approx(value, rel=0.1), name


def test_noise_of_a_tenth_leaves_predictions_close():
    cost, rng = trained(400, noise=0.1)
    off = errors(cost, rng)
    assert max(off) < 0.25
    assert sum(off) / len(off) < 0.06


@pytest.mark.parametrize("slowdown", [3.0, 1 / 3])
def test_a_lasting_change_is_learned_within_thirty_steps_of_one_kind(slowdown):
    cost, _ = trained()
    shape = decode([500] * 4)
    for _ in range(30):
        cost.observe_step(shape, true_s(shape, slowdown))
    assert cost.step_s(shape) == pytest.approx(true_s(shape, slowdown), rel=0.05)


@pytest.mark.parametrize("slowdown", [3.0, 1 / 3])
def test_a_lasting_change_is_learned_from_mixed_steps(slowdown):
    cost, rng = trained(noise=0.05)
    for _ in range(30):
        shape = any_shape(rng)
        cost.observe_step(shape, true_s(shape, slowdown))
    off = errors(cost, rng, slowdown)
    assert max(off) < 0.6
    assert sum(off) / len(off) < 0.15


def test_what_a_slower_machine_shows_in_decoding_is_expected_of_prefill():
    cost, _ = trained()
    for _ in range(50):
        cost.observe_step(decode([500] * 4), true_s(decode([500] * 4), 3))
    assert cost.step_s(prefill(256, 0)) == pytest.approx(true_s(prefill(256, 0), 3), rel=0.3)


def test_one_outlier_barely_moves_anything():
    cost, rng = trained(noise=0.05)
    shapes = [any_shape(rng) for _ in range(100)]
    before = [cost.step_s(shape) for shape in shapes]
    cost.observe_step(decode([500] * 4), 5 * true_s(decode([500] * 4)))
    moved = [abs(cost.step_s(s) / b - 1) for s, b in zip(shapes, before, strict=True)]
    assert max(moved) < 0.05


def test_outliers_now_and_then_are_not_believed():
    cost, rng = trained(noise=0.05)
    for index in range(300):
        shape = any_shape(rng)
        cost.observe_step(shape, true_s(shape, 5 if index % 10 == 0 else 1))
    off = errors(cost, rng)
    assert sum(off) / len(off) < 0.15


def test_hours_of_decoding_do_not_blur_what_is_known_of_prefill():
    cost, rng = trained()
    for _ in range(5000):
        shape = decode([rng.randint(100, 200) for _ in range(rng.randint(1, 4))])
        cost.observe_step(shape, true_s(shape) * math.exp(rng.gauss(0, 0.1)))
    expected = sum(true_s(prefill(256, start)) for start in range(0, 1024, 256))
    assert cost.prefill_s(1024, 0) == pytest.approx(expected, rel=0.1)


def test_hardware_a_thousand_times_faster_than_assumed_is_learned_at_once():
    cost = model()
    for shape in (decode([1]), decode([2000]), decode([16] * 8), prefill(256, 0)):
        for _ in range(2):
            cost.observe_step(shape, true_s(shape) / 1000)
    assert cost.step_s(prefill(256, 0)) == pytest.approx(true_s(prefill(256, 0)) / 1000, rel=0.2)
    assert cost.decode_step_s(8, 16) == pytest.approx(true_s(decode([16] * 8)) / 1000, rel=0.2)


def test_loads_start_from_plain_assumptions_and_follow_what_they_take():
    cost = model()
    assert cost.load_s("dram", 64) == pytest.approx(64 * 368640 / 5e9, rel=0.05)
    assert cost.load_s("redis", 64) == pytest.approx(1e-3 + 64 * 368640 / 1e9, rel=0.05)
    for blocks in (1, 64, 8, 0, 32, 128, 2, 16):
        cost.observe_load("redis", blocks, 0.2e-3 + blocks * 0.1e-3)
    assert cost.load_s("redis", 64) == pytest.approx(6.6e-3, rel=0.05)
    assert cost.load_s("redis", 0) == pytest.approx(0.2e-3, rel=0.05)
    assert cost.load_s("dram", 64) == pytest.approx(64 * 368640 / 5e9, rel=0.05)


def test_the_error_of_predictions_is_told_by_kind():
    cost, _ = trained(noise=0.1)
    snapshot = cost.snapshot()
    assert 0.02 < snapshot["decode_error"] < 0.3
    assert 0.02 < snapshot["prefill_error"] < 0.3
    assert "dram_error" not in snapshot
    assert model().snapshot().keys() >= TRUE.keys() | {"dram_latency_s", "redis_block_s"}


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_cannot_be_teaches_nothing(seconds):
    cost = model()
    before = cost.snapshot()
    cost.observe_step(decode([100]), seconds)
    cost.observe_load("dram", 3, seconds)
    assert cost.snapshot() == before


def test_a_model_without_weights_is_refused():
    with pytest.raises(ValueError, match="positive"):
        CostModel(token_flops=1, weight_bytes=0, kv_token_bytes=1, block_bytes=1)
