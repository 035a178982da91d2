"""No prompt is computed in chunks that push a running stream past its target."""

from __future__ import annotations

import pytest

from tests.engine.flow_stage import FlatCost, FlowStage

CONSTANT_S, TOKEN_S = 0.010, 0.001


def stage_with_streams(*targets_s: float | None, tokens: int = 400) -> FlowStage:
    """Streams with these targets, all of them decoding."""
    stage = FlowStage(cost=FlatCost(CONSTANT_S, TOKEN_S))
    for index, tpot_s in enumerate(targets_s):
        stage.submit(f"stream {index}", 10, tokens, tpot_s=tpot_s)
    stage.step()
    return stage


def predicted_s(stage: FlowStage) -> float:
    return CONSTANT_S + TOKEN_S * stage.shapes[-1].tokens


def test_steps_stay_within_the_tightest_target():
    stage = stage_with_streams(None, 0.2, 0.08, 0.5)
    for index in range(4):
        stage.submit(f"long {index}", 700, 1)
    prefilled = 0
    while any(each.startswith("long") for each in stage.sequences):
        computed = stage.step()
        prefilled += sum(n for name, n in computed.items() if name.startswith("long"))
        assert predicted_s(stage) <= 0.08
    assert prefilled >= 4 * 700
    # and what may be computed is: 90 % of the target is used while a prompt needs all of it
    assert max(shape.tokens for shape in stage.shapes[1:]) == 62


def test_without_targets_steps_are_as_full_as_ever():
    stage = stage_with_streams(None, None)
    stage.submit("long", 700, 1)
    assert stage.step() == {"stream 0": 1, "stream 1": 1, "long": 254}


def test_a_target_counts_only_while_its_stream_runs():
    stage = stage_with_streams(0.08, tokens=3)
    stage.submit("long", 2000, 1)
    assert stage.step()["long"] == 61
    assert stage.step()["long"] == 61
    assert stage.step()["long"] == 256


def test_the_target_of_a_prompt_that_is_not_computed_yet_binds_nobody():
    stage = stage_with_streams(None)
    stage.submit("long", 700, 4, tpot_s=0.02)
    assert stage.step()["long"] == 255


def test_a_prompt_moves_beside_streams_that_are_nearly_too_slow():
    stage = stage_with_streams(*[0.0141] * 2)
    stage.submit("long", 320, 1)
    assert [stage.step()["long"] for _ in range(20)] == [16] * 20


def test_a_prompt_moves_faster_beside_streams_that_miss_their_target_anyway():
    stage = stage_with_streams(*[0.005] * 2)
    stage.submit("long", 320, 1)
    assert [stage.step()["long"] for _ in range(10)] == [32] * 10


def test_nobody_takes_a_slot_without_a_token_to_compute():
    stage = stage_with_streams(0.08)
    stage.submit("long", 700, 1)
    stage.submit("other", 700, 1)
    stage.step()
    assert [each.request.request_id for each in stage.scheduler.waiting] == ["other"]


@pytest.mark.parametrize("tpot_s", [None, 0.03])
def test_chunks_change_nothing_but_their_size(tpot_s):
    stage = stage_with_streams(tpot_s, tpot_s)
    for index in range(6):
        stage.submit(f"p{index}", 100 + 17 * index, 5, tpot_s=tpot_s)
    stage.finish()
    assert [name for name in stage.done if name.startswith("p")] == [f"p{i}" for i in range(6)]
    assert stage.tokens[b""] == 2 * (10 + 400) + sum(100 + 17 * i + 5 for i in range(6))
