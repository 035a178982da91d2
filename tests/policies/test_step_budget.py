"""How much of prompts a step computes beside its streams."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cost import StepShape
from policies.step_budget import StepBudget, Streams

CONSTANT_S, TOKEN_S, SEQUENCE_S, ATTENDED_S, READ_S = 0.01, 0.001, 0.0005, 1e-6, 2e-6


def step_s(shape: StepShape) -> float:
    return (
        CONSTANT_S
        + TOKEN_S * shape.tokens
        + SEQUENCE_S * shape.sequences
        + ATTENDED_S * shape.attended
        + READ_S * shape.context_read
    )


def never_asked(shape: StepShape) -> float:
    raise AssertionError("nothing is predicted")


def budget(tokens: int, streams: Streams, predict=step_s) -> StepBudget:
    return StepBudget(tokens, streams, 16, predict)


def test_where_no_token_is_due_prompts_get_all_that_streams_leave():
    step = budget(256, Streams(6, 600), never_asked)
    assert step.prefill(1000, 0) == 250
    step.take(100, 0)
    assert step.prefill(1000, 50) == 150
    assert step.prefill(20, 0) == 20


def test_prompts_get_what_lets_tokens_come_in_time():
    step = budget(256, Streams(2, 200, 0.1), step_s)
    tokens = step.prefill(1000, 0)
    assert 16 < tokens < 254
    shapes = [StepShape(2 + n, 3, 200 + n * (n + 1) // 2, 200 + n) for n in (tokens, tokens + 1)]
    assert step_s(shapes[0]) <= 0.09 < step_s(shapes[1])


def test_the_second_prompt_gets_what_the_first_leaves_of_the_time():
    alone = budget(256, Streams(2, 200, 0.1)).prefill(1000, 0)
    step = budget(256, Streams(2, 200, 0.1))
    step.take(40, 0)
    assert 0 < step.prefill(1000, 0) < alone - 39


def test_a_long_context_costs_tokens():
    step = budget(256, Streams(2, 200, 0.1))
    assert step.prefill(1000, 2000) < step.prefill(1000, 0)


def test_a_prompt_reaches_its_end_if_all_of_it_fits():
    step = budget(256, Streams(2, 200, 0.1))
    fits = step.prefill(1000, 0)
    assert step.reaches(fits, 0)
    assert not step.reaches(fits + 1, 0)
    step.take(fits, 0)
    assert step.reaches(0, 300)


def test_a_block_is_computed_however_little_time_is_left():
    step = budget(256, Streams(4, 400, 0.0195))
    assert step.prefill(1000, 0) == 16
    step.take(10, 0)
    assert step.prefill(1000, 0) == 6
    step.take(6, 0)
    assert step.prefill(1000, 0) == 0


def test_where_streams_alone_are_too_slow_an_eighth_of_the_step_is():
    assert budget(256, Streams(4, 400, 0.001)).prefill(1000, 0) == 32
    assert budget(64, Streams(4, 400, 0.001)).prefill(1000, 0) == 16
    assert budget(8, Streams(4, 400, 0.001)).prefill(1000, 0) == 4
    assert budget(256, Streams(4, 400, -1.0)).prefill(1000, 0) == 32


def test_a_full_step_has_room_for_nobody():
    assert budget(4, Streams(4, 400, 0.5)).prefill(10, 0) == 0
    assert budget(4, Streams(4, 400)).prefill(10, 0) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(0, 40),
    st.integers(0, 4000),
    st.none() | st.floats(1e-4, 1.0),
    st.lists(st.tuples(st.integers(1, 500), st.integers(0, 4000)), max_size=8),
)
def test_never_over_the_tokens_nor_over_the_time(tokens, streams, context, due_s, prompts):
    streams = min(streams, tokens)
    context = max(context, streams)
    step = budget(tokens, Streams(streams, context, due_s if streams else None))
    shape = StepShape(streams, streams, context, context)
    alone_s = step_s(shape)
    given_tokens = 0
    for wanted, computed in prompts:
        share = step.prefill(wanted, computed)
        assert 0 <= share <= wanted
        step.take(share, computed)
        given_tokens += share
        shape = StepShape(
            shape.tokens + share,
            shape.sequences + (share > 0),
            shape.attended + share * computed + share * (share + 1) // 2,
            shape.context_read + (computed + share if share else 0),
        )
    assert shape.tokens <= tokens
    if due_s is None or not streams:
        assert given_tokens == min(tokens - streams, sum(wanted for wanted, _ in prompts))
    else:
        least = 16 if alone_s <= 0.9 * due_s else max(16, tokens // 8)
        assert step_s(shape) <= due_s or given_tokens <= least
        if prompts and streams < tokens:
            assert given_tokens > 0


@pytest.mark.parametrize("due_s", [0.03, 0.05, 0.2])
def test_less_time_never_lets_more_in(due_s):
    wide = budget(256, Streams(3, 300, due_s)).prefill(500, 0)
    tight = budget(256, Streams(3, 300, due_s * 0.8)).prefill(500, 0)
    assert tight <= wide
