from __future__ import annotations

from typing import Any

import pytest

from loadtest.simulate.hardware import (
    H100,
    LLAMA_8B,
    ModelSize,
    computed_kind,
    given_cost,
    with_block_tokens,
)
from policies.cost import CostModel, StepShape


def test_eight_billion_parameters_on_one_card() -> None:
    cost, max_running, device_tokens = computed_kind(LLAMA_8B, H100)
    assert LLAMA_8B.kv_token_bytes == 131_072
    # 16 GB of weights at 2.7 TB/s, and a millisecond
    assert cost.constant_s == pytest.approx(7.0e-3, rel=0.01)
    # 16 GFLOP at half of 989 TFLOP/s
    assert 1 / cost.token_s == pytest.approx(30_800, rel=0.01)
    assert cost.attended_s == pytest.approx(1.06e-9, rel=0.01)
    assert cost.context_read_s == pytest.approx(48.9e-9, rel=0.01)
    assert device_tokens == pytest.approx(411_000, rel=0.01)
    assert max_running == 128


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="140 GB of weights"):
        computed_kind(ModelSize(70e9, 80, 64, 8, 128), H100)


def test_moving_a_token_takes_as_long_in_other_blocks() -> None:
    cost = computed_kind(LLAMA_8B, H100).cost
    assert with_block_tokens(cost, 512).load_s(4096, 2048) == pytest.approx(cost.load_s(4096, 2048))


def test_coefficients_of_ones_own() -> None:
    cost = computed_kind(LLAMA_8B, H100).cost
    assert given_cost(cost._asdict()) == cost


def test_a_cost_model_begins_with_what_is_given() -> None:
    cost = computed_kind(LLAMA_8B, H100).cost
    model = CostModel.given(cost)
    assert model.coefficients(cost.step_tokens, cost.block_tokens) == cost
    shape = StepShape(tokens=40, sequences=3, attended=500, context_read=90)
    assert model.step_s(shape) == cost.step_s(shape)
    assert model.load_s("dram", 5) == pytest.approx(cost.load_s(80, 0))
    with pytest.raises(ValueError, match="positive"):
        CostModel.given(cost._replace(token_s=0.0))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token_s": 0.0}, "token_s must be a positive number"),
        ({"token_s": "fast"}, "token_s must be a positive number"),
        ({"step_tokens": 2.5}, "step_tokens must be a positive number"),
        ({"step_tokens": True}, "step_tokens must be a positive number"),
        ({"tokens_s": 1.0}, "not right: tokens_s"),
    ],
)
def test_coefficients_that_make_no_sense_are_refused(changes: dict[str, Any], says: str) -> None:
    values = computed_kind(LLAMA_8B, H100).cost._asdict() | changes
    with pytest.raises(ValueError, match=says):
        given_cost(values)
