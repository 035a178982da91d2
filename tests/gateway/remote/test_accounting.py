"""What is kept of a relayed request: its part of a server's load, how long answers are, its line in
the log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from gateway.demand import Ask, demand_of
from gateway.dispatch.member import Condition
from gateway.metrics import Metrics
from gateway.settlement import settled
from policies.pricing import FREE
from tests.gateway.remote.remote_stage import ACME, COMPLETIONS, SECRET, RemoteStage, chat, staged
from tests.gateway.remote.upstream import (
    Received,
    Upstream,
    answers,
    breaks_after,
    chunk,
    sse,
    streams,
    usage_chunk,
    whole,
)
from tests.gateway.stage import eventually


def logged(stage: RemoteStage) -> dict:
    """The line of the last request."""
    with capture_logs() as lines, settled(stage.last, Metrics(["m"], ["acme"], SECRET)):
        pass
    (line,) = lines
    return line


async def test_a_whole_answer_runs_from_when_it_should_have_begun():
    may_answer = asyncio.Event()

    async def script(received: Received) -> None:
        await may_answer.wait()
        await received.answer(200, whole())

    async with staged(Upstream([script])) as stage, stage.call(chat()) as call:
        [member] = stage.router.members
        await eventually(lambda: member.load.standing().running == 1)
        assert member.load.standing().waiting == 0
        own = stage.replicas[0].own_load
        assert (own.waiting, own.running) == (0, 1)
        may_answer.set()
        await call.task
        assert call.answer.status == 200
        assert member.load.sequences == 0
        assert (own.waiting, own.running) == (0, 0)
        # that it ran was presumed; when it began is not known, and nothing is learned of it
        assert stage.last.receipts()[0].began_s is None
        assert stage.last.ttft_s() is None


async def test_how_long_answers_are_is_learned_from_those_that_are_over():
    async with staged(Upstream([streams("a b c d e f"), answers(200, whole())])) as stage:
        [member] = stage.router.members
        assert member.load.standing().answer_tokens == 0
        await stage.post(chat(stream=True))
        assert member.load.standing().answer_tokens == 6
        await stage.post(chat())  # of five tokens
        assert 5 <= member.load.standing().answer_tokens <= 6


async def test_choices_side_by_side_are_as_long_as_one_of_them():
    async def script(received: Received) -> None:
        both = [
            chunk("a"),
            chunk("b", index=1),
            chunk(finish="stop"),
            chunk(finish="stop", index=1),
        ]
        await received.begin_stream()
        await received.piece(sse(*both, usage_chunk(20, 30), "[DONE]"))
        await received.end_stream()

    async with staged(Upstream([script])) as stage:
        await stage.post(chat(stream=True, n=2))
        assert stage.router.members[0].load.standing().answer_tokens == 15


async def test_an_answer_that_broke_off_counts_for_what_there_was():
    upstream = Upstream([breaks_after(3), streams("The quick brown fox")])
    async with staged(upstream) as stage:
        await stage.post(chat(stream=True))
        assert len(stage.last.receipts()) == 2
        assert 3 <= stage.router.members[0].load.standing().answer_tokens <= 4
        assert stage.router.members[0].load.sequences == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_the_line_says_whether_it_was_a_stream_and_when_that_began(stream):
    script = streams("a b") if stream else answers(200, whole())
    async with staged(Upstream([script])) as stage:
        await stage.post(chat(stream=stream))
        line = logged(stage)
    assert line["stream"] is stream
    assert (line["ttft_ms"] is not None) is stream
    assert line["generated_tokens"] == (2 if stream else 5)
    assert line["predicted_ttft_ms"] > 0


async def test_a_server_that_was_down_from_the_start_has_not_been_restarted():
    upstream = Upstream(silent=True)
    async with staged(upstream) as stage:
        [replica] = stage.replicas
        assert replica.health().condition is Condition.DOWN
        upstream.silent = False
        await stage.serving()
        assert stage.restarts == 0
        upstream.silent = True
        await eventually(lambda: replica.health().condition is Condition.DOWN)
        upstream.silent = False
        await stage.serving()
        assert stage.restarts == 1


async def test_what_a_vllm_tells_of_a_requests_kv_is_not_its_clients_to_say():
    upstream = Upstream([answers(200, whole())])
    async with staged(upstream) as stage:
        await stage.post(chat(vllm_xargs={"kv_cache_report_mode": "off", "mine": 1}))
    assert upstream.received[0].body["vllm_xargs"] == {"mine": 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_no_more_counts_as_cached_than_there_was(stream):
    said = {
        "prompt_tokens": 20,
        "completion_tokens": 5,
        "total_tokens": 25,
        "prompt_tokens_details": {"cached_tokens": 1000},
    }

    async def script(received: Received) -> None:
        if not stream:
            await received.answer(200, {**whole(), "usage": said})
            return
        await received.begin_stream()
        ending = {**chunk(finish="stop"), "usage": said}
        await received.piece(sse(chunk("a"), ending, "[DONE]"))
        await received.end_stream()

    async with staged(Upstream([script])) as stage:
        await stage.post(chat(stream=stream))
        usage = stage.last.usage()
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (20, 20, 5)


@pytest.mark.parametrize("tokens", [1 << 40, -1, 2.5, True, "7"])
async def test_a_count_that_cannot_be_is_no_usage(tokens):
    answer = whole()
    answer["usage"] = {"prompt_tokens": tokens, "completion_tokens": 5}
    async with staged(Upstream([answers(200, answer)])) as stage:
        await stage.post(chat("hello"))
        assert 0 < stage.last.usage().prompt_tokens < 100


async def test_every_prompt_is_reserved_and_not_the_first_alone():
    asked: list[Ask] = []

    async def let_in(asks: Sequence[Ask]) -> None:
        asked.extend(asks)

    async with staged(Upstream([answers(200, whole())]), let_in=let_in) as stage:
        body = {"model": "m", "prompt": ["hi", "x" * 40_000, [1] * 500], "n": 2, "max_tokens": 3}
        await stage.post(body, endpoint=COMPLETIONS)
    demand = demand_of(asked, [0] * len(asked), ACME, FREE)
    assert 10_500 <= demand.tokens - 6 * 3 <= 10_502


async def test_an_answer_longer_than_any_is_refused():
    async with staged(Upstream([answers(200, whole())])) as stage:
        for most in (1 << 31, 1e30):
            answer = await stage.post(chat(max_tokens=most))
            assert answer.status == 400
            assert answer.json["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token_has_used_its_prompt(stream):
    arrived = asyncio.Event()

    async def script(received: Received) -> None:
        arrived.set()
        await received.gone()

    async with staged(Upstream([script])) as stage:
        async with stage.call(chat("x" * 400, stream=stream)):
            await arrived.wait()
        usage = stage.last.usage()
        assert (usage.prompt_tokens > 100, usage.completion_tokens) == (True, 0)
