"""Percentiles against worked numbers, and a repetition's figures from its answers."""

from __future__ import annotations

import asyncio
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.bench.closed_loop import LoopOutcome, run_closed_loop
from loadtest.bench.completion import Completion, Failure
from loadtest.bench.measure import run_once, sum_up
from loadtest.bench.workloads import W4, Workload
from loadtest.stats.distribution import Distribution, percentile
from loadtest.target import Target
from tests.loadtest.fake_server import (
    Call,
    Reply,
    answer_well,
    fake_server,
    token_event,
    usage_event,
)

SMALL = Workload("small", "", 4, 12, 16, 16, 3)


def completion(ttft_s: float, *, name: str = "all", cached: int | None = 0) -> Completion:
    return Completion(name, ttft_s, 0.01, ttft_s + 0.07, 1024, 8, cached, 8, "")


def test_percentiles_of_worked_numbers() -> None:
    ten = [96.0, 97, 98, 99, 100, 100, 101, 102, 107, 3000]

    assert percentile(ten, 0.5) == 100
    assert percentile(ten, 0.9) == pytest.approx(107 + 0.1 * (3000 - 107))
    assert percentile(ten, 1) == 3000
    assert percentile([7], 0.99) == 7
    spread = Distribution.of(ten)
    assert spread is not None
    assert spread.mean == 390
    assert (spread.count, spread.min, spread.max) == (10, 96, 3000)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_a_percentile_lies_within_and_grows_with_its_share(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)

    assert min(values) <= found <= max(values)
    assert percentile(values, share / 2) <= found
    assert percentile(values, 0.5) == pytest.approx(median(values))


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_a_percentile_of_nothing_is_refused(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="needs values"):
        percentile(values, share)


def test_no_values_have_no_distribution() -> None:
    assert Distribution.of([]) is None


def test_failures_enter_no_figure() -> None:
    results = (completion(0.1), Failure("all", "cut"), completion(0.3))
    repetition = sum_up(SMALL, 7, LoopOutcome(results, 2.0))

    assert repetition.requests == 3
    assert repetition.failures == ("small: cut",)
    assert repetition.output_tokens_per_s == 16 / 2
    (figures,) = repetition.passes
    assert figures.ttft_ms is not None
    assert (figures.ttft_ms.count, figures.ttft_ms.p50) == (2, pytest.approx(200))


def test_passes_are_told_apart() -> None:
    results = tuple(
        one
        for _ in range(3)
        for one in (
            completion(0.4, name="cold", cached=0),
            completion(0.02, name="hit", cached=1008),
        )
    )
    cold, hit = sum_up(W4, 0, LoopOutcome(results, 3.0)).passes

    assert cold.ttft_ms is not None
    assert hit.ttft_ms is not None
    assert (cold.ttft_ms.p50, hit.ttft_ms.p50) == (pytest.approx(400), pytest.approx(20))
    assert (cold.cached_tokens, hit.cached_tokens) == (0, 3024)
    assert hit.tokens_per_chunk == 1


def test_when_everything_fails_there_is_no_figure() -> None:
    repetition = sum_up(SMALL, 0, LoopOutcome((Failure("all", "x"),) * 2, 0.0))

    assert repetition.output_tokens_per_s is None
    assert repetition.passes[0].ttft_ms is None
    assert len(repetition.failures) == 2


async def test_the_loop_keeps_its_concurrency_and_sends_every_prompt_once() -> None:
    async def paced(call: Call, reply: Reply) -> None:
        await asyncio.sleep(0.005)
        await answer_well(call, reply)

    async with fake_server(paced, key="sk-1") as server:
        target = Target("fake", server.endpoint, "m")
        repetition = await run_once(target, SMALL, 3)

    assert not repetition.failures
    assert repetition.output_tokens == 36
    assert server.most_in_flight == 4
    assert server.connections == 4
    sent = sorted(tuple(call.body["prompt"]) for call in server.calls)
    assert sent == sorted(send.prompt for send in SMALL.sends(3, target.vocabulary))
    for call in server.calls:
        assert (call.method, call.path) == ("POST", "/v1/completions")
        assert call.headers["authorization"] == "Bearer sk-1"


async def test_ttft_and_tpot_over_a_real_connection() -> None:
    async def timed(call: Call, reply: Reply) -> None:
        await asyncio.sleep(0.06)
        await reply.head(content_type="text/event-stream", transfer_encoding="chunked")
        for finish in (None, None, "length"):
            await reply.event(token_event("x", finish))
            await asyncio.sleep(0.03)
        await reply.event(usage_event(32, 3))
        await reply.event(b"[DONE]")
        await reply.chunk(b"")

    async with fake_server(timed) as server:
        outcome = await run_closed_loop(
            Target("fake", server.endpoint, "m"), Workload("one", "", 1, 1, 0, 32, 3), 0
        )

    (result,) = outcome.results
    assert isinstance(result, Completion)
    # Only lower bounds: how late a busy machine wakes a sleeper is not for a test to say.
    assert result.ttft_s >= 0.055
    assert result.tpot_s is not None
    assert result.tpot_s >= 0.025
    assert result.e2e_s >= result.ttft_s + 2 * result.tpot_s + 0.025
    assert outcome.wall_s == pytest.approx(result.e2e_s)


async def test_a_truncated_stream_is_a_failure_and_the_loop_goes_on() -> None:
    async def cutting_every_third(call: Call, reply: Reply) -> None:
        if len(server.calls) % 3:
            await answer_well(call, reply)
            return
        await reply.head(content_type="text/event-stream", transfer_encoding="chunked")
        await reply.event(token_event("x"))
        reply.writer.close()

    async with fake_server(cutting_every_third) as server:
        repetition = await run_once(Target("fake", server.endpoint, "m"), SMALL, 0)

    assert len(server.calls) == 12
    assert len(repetition.failures) == 4
    assert set(repetition.failures) == {"small: the connection closed in the middle of the answer"}
    assert repetition.output_tokens == 8 * 3
