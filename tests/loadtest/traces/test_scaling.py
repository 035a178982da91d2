"""Scaling: faster, shorter, fewer, and still as shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.trace import Trace, TraceRequest
from loadtest.traces.description import describe
from loadtest.traces.reading import read_trace
from loadtest.traces.scaling import Scale, scaled

_TRACE = Trace(
    "small",
    512,
    [
        TraceRequest(0.0, 1025, 320, (0, 1, 2)),
        TraceRequest(0.0, 1536, 10, (0, 1, 3)),
        TraceRequest(0.0, 3, 0, (4,)),
        TraceRequest(3.0, 64, 64),
        TraceRequest(9.0, 512, 100, (0,)),
    ],
)


def _times(trace: Trace) -> list[float]:
    return [request.at_s for request in trace.requests]


def test_twice_as_fast_is_half_the_time() -> None:
    assert _times(scaled(_TRACE, Scale(speed=2)).trace) == [0, 0, 0, 1.5, 4.5]


def test_the_first_seconds_are_those_of_the_new_speed() -> None:
    assert _times(scaled(_TRACE, Scale(speed=2, seconds=1.6)).trace) == [0, 0, 0, 1.5]
    assert len(scaled(_TRACE, Scale(requests=2)).trace.requests) == 2


def test_what_came_at_one_tick_is_laid_out_until_the_next() -> None:
    assert _times(scaled(_TRACE, Scale(spread=True)).trace) == [0, 1, 2, 3, 9]


def test_blocks_shrink_with_their_prompts() -> None:
    trace = scaled(_TRACE, Scale(length=1 / 32)).trace

    assert trace.block_tokens == 16
    lengths = [(request.prompt_tokens, request.output_tokens) for request in trace.requests]
    assert lengths == [(33, 10), (48, 1), (1, 0), (2, 2), (16, 3)]
    assert [request.blocks for request in trace.requests] == [
        request.blocks for request in _TRACE.requests
    ]


def test_answers_may_have_a_factor_of_their_own() -> None:
    trace = scaled(_TRACE, Scale(length=1 / 32, output_length=0.5)).trace

    assert [request.output_tokens for request in trace.requests] == [160, 5, 0, 32, 50]


def test_without_blocks_the_factor_is_exact() -> None:
    trace = scaled(Trace("", 16, [TraceRequest(0, 1000, 100)]), Scale(length=0.01)).trace

    assert trace.block_tokens == 16
    assert trace.requests[0].prompt_tokens == 10


@given(length=st.floats(0.001, 3.0))
@settings(max_examples=25, deadline=None)
def test_every_prompt_ends_in_its_last_block(length: float) -> None:
    trace = scaled(_TRACE, Scale(length=length)).trace

    for request in trace.requests:
        if request.blocks:
            assert -(-request.prompt_tokens // trace.block_tokens) == len(request.blocks)


def test_what_is_too_long_is_dropped_and_counted() -> None:
    found = scaled(_TRACE, Scale(longest_tokens=1345))

    assert (found.dropped, found.cut) == (1, 0)
    assert [request.prompt_tokens for request in found.trace.requests] == [1025, 3, 64, 512]


def test_prompts_are_cut_to_whole_blocks() -> None:
    found = scaled(_TRACE, Scale(longest_tokens=700, too_long="cut"))

    # 380 tokens of room beside the first one's answer are no whole block
    assert (found.dropped, found.cut) == (1, 1)
    assert found.trace.requests[0] == TraceRequest(0.0, 512, 10, (0,))


def test_a_prompt_without_blocks_is_cut_to_the_token() -> None:
    trace = Trace("", 16, [TraceRequest(0, 1000, 100), TraceRequest(0, 1, 100)])

    found = scaled(trace, Scale(longest_tokens=100, too_long="cut"))
    assert (found.dropped, found.cut) == (2, 0)
    found = scaled(trace, Scale(longest_tokens=150, too_long="cut"))
    assert [request.prompt_tokens for request in found.trace.requests] == [50, 1]


def test_scaling_keeps_what_is_shared() -> None:
    trace = read_trace("mooncake")
    short = scaled(trace, Scale(length=1 / 32, speed=10)).trace

    assert describe(short).ideal_hit_rate == describe(trace).ideal_hit_rate
    assert scaled(trace, Scale(length=1 / 32, speed=10)).trace == short


@pytest.mark.parametrize(
    "wrong", [{"speed": 0}, {"length": -1}, {"requests": 0}, {"seconds": float("nan")}]
)
def test_what_is_not_positive_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be more than 0"):
        Scale(**wrong)  # type: ignore[arg-type]  # the keys are names of fields
