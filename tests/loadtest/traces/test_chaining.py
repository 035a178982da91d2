"""From traces to loads and back: the very same sharing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.plan import Load, Session, TenantPlan, Turn
from loadtest.trace import Trace, TraceRequest
from loadtest.traces.block_ids import BlockIds, filled
from loadtest.traces.chaining import trace_of
from loadtest.traces.description import describe
from loadtest.workloads.replay import load_of

_BLOCK = 8
_LEAST_TAIL = 4
"""Shorter tails of different blocks might be the same tokens by chance."""


@st.composite
def _traces(draw: st.DrawFn) -> Trace:
    """Prompts as paths in a tree of a few branches, so that much is shared."""
    blocks = BlockIds()
    requests = []
    at_s = 0.0
    for _ in range(draw(st.integers(1, 12))):
        path = draw(st.lists(st.integers(0, 2), max_size=6))
        tail = draw(st.integers(_LEAST_TAIL, _BLOCK))
        prompt_tokens = len(path) * _BLOCK + tail
        keys = zip([*path, 0], filled(prompt_tokens, _BLOCK), strict=True)
        at_s += draw(st.sampled_from([0.0, 0.5]))
        requests.append(TraceRequest(at_s, prompt_tokens, draw(st.integers(1, 9)), blocks.of(keys)))
    return Trace("drawn", _BLOCK, requests)


def _renumbered(trace: Trace) -> list[tuple[object, ...]]:
    """Everything but the ids themselves, which say nothing beyond which are equal."""
    numbers: dict[int, int] = {}
    return [
        (
            *(request.at_s, request.prompt_tokens, request.output_tokens, request.tenant),
            [numbers.setdefault(block, len(numbers)) for block in request.blocks],
        )
        for request in trace.requests
    ]


@given(trace=_traces(), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_a_trace_comes_back_from_its_load(trace: Trace, seed: int) -> None:
    assert _renumbered(trace_of(load_of(trace, seed=seed), _BLOCK)) == _renumbered(trace)


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=8)
)
@settings(max_examples=50, deadline=None)
def test_blocks_are_shared_as_far_as_prompts_agree(prompts: list[list[int]]) -> None:
    load = Load("", [Session((Turn(1, tokens=tokens),)) for tokens in prompts])

    requests = trace_of(load, 4).requests

    for one, tokens in zip(requests, prompts, strict=True):
        for other, others in zip(requests, prompts, strict=True):
            assert _common(one.blocks, other.blocks) == _common(_cut(tokens), _cut(others))


def _cut(tokens: list[int]) -> list[list[int]]:
    return [tokens[start : start + 4] for start in range(0, len(tokens), 4)]


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_a_chat_grows_by_its_answers() -> None:
    def said(words: str) -> tuple[dict[str, str], ...]:
        return ({"role": "user", "content": words},)

    turns = (Turn(3, messages=said("a b c")), Turn(5, messages=said("d, e"), think_s=2.0))
    load = Load("chat", [Session(turns, "one", 1.0), Session(turns, "one", 1.5)])

    trace = trace_of(load, 4, answer_s=0.25)

    assert [request.at_s for request in trace.requests] == [1.0, 1.5, 3.25, 3.75]
    # a role and three words; then its answer of three, a role, two words and a comma
    assert [request.prompt_tokens for request in trace.requests] == [4, 4, 11, 11]
    first, second, first_again, second_again = (request.blocks for request in trace.requests)
    assert list(first) == list(second) == list(first_again[:1])
    # two chats that have asked the same have not been answered the same
    assert not set(first_again[1:]) & set(second_again[1:])


def test_fields_stand_before_the_chat() -> None:
    message = ({"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "me"},)
    loads = [
        Load("", [Session((Turn(1, messages=message, fields=fields),))])
        for fields in ({"tools": [{"name": "find"}]}, {})
    ]

    with_tools, without = (trace_of(load, 16).requests[0] for load in loads)

    assert with_tools.prompt_tokens > without.prompt_tokens > 5


def test_tenants_go_both_ways() -> None:
    tenants = (TenantPlan("a"), TenantPlan("b"))
    trace = Trace("", 4, [TraceRequest(0, 4, 1, (0,), "b")], tenants)

    load = load_of(trace)

    assert (load.tenants, load.sessions[0].tenant) == (tenants, "b")
    assert trace_of(load, 4).tenants == tenants


def test_figures_of_a_small_trace() -> None:
    trace = Trace(
        "small",
        4,
        [
            TraceRequest(0.0, 8, 1, (0, 1)),
            TraceRequest(1.0, 8, 3, (0, 2)),
            TraceRequest(4.0, 12, 5, (0, 2, 3)),
        ],
    )

    found = describe(trace)

    assert (found.requests, found.span_s, found.rate_rps) == (3, 4.0, 0.75)
    assert (found.blocks, found.unique_blocks) == (7, 4)
    assert found.ideal_hit_rate == pytest.approx(3 / 7)
    assert (found.prompt_tokens.p50, found.output_tokens.mean) == (8, 3)


def test_figures_without_blocks_or_time() -> None:
    found = describe(Trace("one", 16, [TraceRequest(0.0, 8, 1)]))

    assert (found.rate_rps, found.ideal_hit_rate, found.blocks) == (None, None, 0)
    with pytest.raises(ValueError, match="none: has no requests"):
        describe(Trace("none", 16, []))
