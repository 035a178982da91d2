"""What an answer cost, where a server tells it of each choice by itself."""

from __future__ import annotations

import pytest

from gateway.remote.usage import ReportedUsage, of_all_choices, read_usage
from tests.gateway.remote.remote_stage import COMPLETIONS, chat, staged
from tests.gateway.remote.upstream import Received, Upstream, answers, chunk, sse, usage_chunk
from tests.gateway.stage import chunks, events


def told(prompt: int, completion: int, cached: int | None) -> ReportedUsage:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    usage = read_usage({"prompt_tokens": prompt, "completion_tokens": completion, **details})
    assert usage is not None
    return usage


def counts(usage: ReportedUsage) -> tuple[int, int, int | None]:
    return usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens


def test_choices_of_one_prompt_share_it():
    usage = of_all_choices(
        [told(34, 6, 24), told(34, 5, 33), told(34, 1, 33)], choices=3, prompts=1
    )
    assert counts(usage) == (34, 12, 24)
    assert usage.wire["total_tokens"] == 46


def test_prompts_side_by_side_are_added_up():
    usage = of_all_choices([told(3, 5, None), told(9, 2, None)], choices=2, prompts=2)
    assert counts(usage) == (12, 7, None)
    both = [told(3, 1, 2), told(3, 1, 2), told(9, 1, 8), told(9, 1, 8)]
    assert counts(of_all_choices(both, choices=4, prompts=2)) == (12, 4, 10)


@pytest.mark.parametrize("of_one", [True, False])
async def test_a_streams_choices_are_counted_together_where_each_is_told(of_one):
    async def script(received: Received) -> None:
        await received.begin_stream()
        await received.piece(sse("null"))
        for index in (1, 0):
            await received.piece(sse(chunk("a", index=index), chunk(index=index, finish="stop")))
            timings = {"timings": {"predicted_n": 5 + index}} if of_one else {}
            await received.piece(sse({**usage_chunk(20, 5 + index, 16 + index), **timings}))
        await received.piece(sse("[DONE]"))
        await received.end_stream()

    async with staged(Upstream([script]), settings={"engine": "llama.cpp"}) as stage:
        body = chat(stream=True, n=2, stream_options={"include_usage": True})
        answer = await stage.post(body)
        usages = [each["usage"] for each in chunks(events(answer.text)) if each.get("usage")]
        assert len(usages) == 1
        expected = 11 if of_one else 5
        assert usages[0]["completion_tokens"] == expected
        assert usages[0]["prompt_tokens_details"]["cached_tokens"] == 16
        assert stage.last.relayed is not None
        assert stage.last.relayed.completion_tokens == expected
        assert stage.last.relayed.prompt_tokens == 20


async def test_the_other_choices_of_a_whole_answer_are_estimated_by_their_lengths():
    texts = ["abcdefgh", "abcd", "a" * 80]
    body = {
        "object": "text_completion",
        "choices": [
            {"index": at, "text": text, "finish_reason": "stop"} for at, text in enumerate(texts)
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
        "timings": {"predicted_n": 4},
    }
    async with staged(Upstream([answers(200, body)]), settings={"engine": "llama.cpp"}) as stage:
        request = {"model": "m", "prompt": "x", "n": 3, "max_tokens": 30}
        answer = await stage.post(request, endpoint=COMPLETIONS)
        assert answer.json["usage"]["completion_tokens"] == 4 + 2 + 30
        assert answer.json["usage"]["total_tokens"] == 3 + 36
        alone = {**body, "choices": body["choices"][:1]}
    async with staged(Upstream([answers(200, alone)]), settings={"engine": "llama.cpp"}) as stage:
        answer = await stage.post({**request, "n": 1}, endpoint=COMPLETIONS)
        assert answer.json["usage"]["completion_tokens"] == 4
