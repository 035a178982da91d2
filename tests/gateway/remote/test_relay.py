"""Answers of remote servers on their way to the client."""

from __future__ import annotations

import asyncio
import json
from time import monotonic

import pytest

from gateway.sse import StreamTimes
from tests.gateway.remote.remote_stage import COMPLETIONS, KEY, chat, staged
from tests.gateway.remote.upstream import (
    Received,
    Upstream,
    answers,
    chunk,
    in_turn,
    sse,
    streams,
    usage,
    usage_chunk,
    whole,
)
from tests.gateway.stage import chunks, events, joined, tenant


async def test_a_whole_answer_comes_in_our_models_name():
    upstream = Upstream([answers(200, whole("Hello"))])
    async with staged(upstream) as stage:
        answer = await stage.post(chat(temperature=0))
    assert answer.status == 200
    assert answer.json["model"] == "m"
    assert answer.json["choices"][0]["message"]["content"] == "Hello"
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert answer.headers["x-forebay-replica"] == stage.replicas[0].name
    assert answer.headers["x-forebay-cached-tokens"] == "16"
    assert float(answer.headers["x-forebay-predicted-ttft-ms"]) > 0
    assert float(answer.headers["x-forebay-queue-ms"]) >= 0
    assert stage.last.usage().prompt_tokens == 20
    assert stage.last.usage().completion_tokens == 5


async def test_a_stream_comes_in_our_models_name_without_a_usage_nobody_asked_for():
    upstream = Upstream([streams("The quick brown fox")])
    async with staged(upstream) as stage:
        answer = await stage.post(chat(stream=True))
        found = chunks(events(answer.text))
    assert joined(found) == "The quick brown fox"
    assert {part["model"] for part in found} == {"m"}
    assert {part["id"] for part in found} == {"up-1"}
    assert all("usage" not in part for part in found)
    assert [c["finish_reason"] for part in found for c in part["choices"]][-1] == "stop"
    assert upstream.received[0].body["stream_options"] == {"include_usage": True}
    assert stage.last.usage().completion_tokens == 4
    assert stage.last.ttft_s() is not None


@pytest.mark.parametrize("cached", [0, 16, None])
async def test_usage_is_the_servers_and_a_zero_stays_zero(cached):
    async with staged(Upstream([streams("a b", cached)])) as stage:
        answer = await stage.post(chat(stream=True, stream_options={"include_usage": True}))
    *_, last = chunks(events(answer.text))
    assert last["choices"] == []
    assert last["model"] == "m"
    assert last["usage"]["prompt_tokens"] == 20
    assert last["usage"]["completion_tokens"] == 2
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == (cached or 0)
    assert stage.last.usage().cached_tokens == (cached or 0)
    assert stage.observer.receipts[0].served_tokens == cached


async def test_usage_that_the_server_does_not_tell_is_not_invented():
    async def script(received: Received) -> None:
        await received.begin_stream()
        await received.piece(sse(chunk("a"), chunk("b"), chunk(finish="stop"), "[DONE]"))
        await received.end_stream()

    bare = {key: value for key, value in whole().items() if key != "usage"}
    async with staged(Upstream([script, answers(200, bare)])) as stage:
        streamed = await stage.post(chat(stream=True, stream_options={"include_usage": True}))
        answer = await stage.post(chat())
    assert all(not part.get("usage") for part in chunks(events(streamed.text)))
    assert stage.requests[0].usage().completion_tokens == 2
    assert "usage" not in answer.json


async def test_explicit_zeros_of_a_whole_answer_stay():
    zero = whole(usage=usage(0, 0))
    async with staged(Upstream([answers(200, zero)])) as stage:
        answer = await stage.post(chat())
    assert answer.json["usage"]["prompt_tokens"] == 0
    assert answer.json["usage"]["completion_tokens"] == 0
    assert stage.last.usage().prompt_tokens == 0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
async def test_events_may_be_cut_anywhere_and_end_in_any_way(size, end):
    text = "Grüße 東京 🦊 \u2028 end"

    async def script(received: Received) -> None:
        data = b": hello" + end[: len(end) // 2]
        data += b"event: message" + end[: len(end) // 2] + sse(chunk("", role=True), end=end)
        for piece in (text[:7], text[7:]):
            shown = chunk(piece)
            data += b"id: 1" + end[: len(end) // 2]
            data += b"data: " + json.dumps(shown, ensure_ascii=False).encode() + end
        data += sse(chunk(finish="stop"), usage_chunk(3, 2), "[DONE]", end=end)
        await received.begin_stream()
        for start in range(0, len(data), size):
            await received.piece(data[start : start + size])
        await received.end_stream()

    async with staged(Upstream([script])) as stage:
        answer = await stage.post(chat(stream=True))
    found = chunks(events(answer.text))
    assert joined(found) == text
    assert "\u2028" not in answer.text
    assert stage.last.usage().completion_tokens == 2


async def test_data_in_several_lines_is_one_event():
    async def script(received: Received) -> None:
        await received.begin_stream()
        lines = json.dumps(chunk("ab"), indent=1).encode().split(b"\n")
        await received.piece(b"".join(b"data: %b\n" % line for line in lines) + b"\n")
        await received.piece(sse(chunk(finish="stop"), "[DONE]"))
        await received.end_stream()

    async with staged(Upstream([script])) as stage:
        answer = await stage.post(chat(stream=True))
    assert joined(chunks(events(answer.text))) == "ab"


async def test_two_choices_both_finish_before_done():
    async def script(received: Received) -> None:
        await received.begin_stream()
        await received.piece(sse(chunk("a"), chunk("b", index=1), chunk(finish="stop", index=1)))
        await received.piece(sse(chunk("c"), chunk(finish="length"), "[DONE]"))
        await received.end_stream()

    async with staged(Upstream([script])) as stage:
        answer = await stage.post(chat(stream=True, n=2))
    found = chunks(events(answer.text))
    assert joined(found, 0) == "ac"
    assert joined(found, 1) == "b"
    assert sum(c["finish_reason"] is not None for part in found for c in part["choices"]) == 2


async def test_completions_are_relayed_too():
    async def script(received: Received) -> None:
        assert received.path == "/v1/completions"
        await received.begin_stream()
        for text, reason in (("to", None), (" be", None), ("", "stop")):
            choice = {"index": 0, "text": text, "finish_reason": reason}
            await received.piece(sse({"id": "c", "model": "served", "choices": [choice]}))
        await received.piece(sse("[DONE]"))
        await received.end_stream()

    async with staged(Upstream([script])) as stage:
        body = {"model": "m", "prompt": "or not", "stream": True}
        answer = await stage.post(body, endpoint=COMPLETIONS)
    assert joined(chunks(events(answer.text))) == "to be"


async def test_a_server_that_says_it_all_but_does_not_end_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("gateway.remote.streaming._USAGE_S", 0.05)

    async def script(received: Received) -> None:
        await received.begin_stream()
        await received.piece(sse(chunk("a"), chunk(finish="stop")))
        await received.gone()

    async with staged(Upstream([script])) as stage:
        answer = await stage.post(chat(stream=True))
    assert joined(chunks(events(answer.text))) == "a"


async def test_nothing_of_the_client_but_its_body_goes_to_the_server():
    upstream = Upstream([answers(200, whole())])
    async with staged(upstream) as stage:
        await stage.post(chat(foo={"bar": [1]}, temperature=0))
    sent = upstream.received[0]
    assert set(sent.headers) == {
        "host",
        "authorization",
        "content-type",
        "content-length",
        "accept",
        "accept-encoding",
        "x-request-id",
    }
    assert sent.headers["authorization"] == f"Bearer {KEY}"
    assert sent.headers["x-request-id"].startswith("req-1.")
    assert sent.body["foo"] == {"bar": [1]}
    assert sent.body["model"] == "served"
    assert "seed" not in sent.body


async def test_the_client_that_waits_hears_comments_and_then_the_answer():
    said_something = asyncio.Event()

    async def script(received: Received) -> None:
        await said_something.wait()
        await streams("late")(received)

    upstream = Upstream([script])
    times = StreamTimes(heartbeat_s=0.04)
    async with staged(upstream, stream_times=times) as stage, stage.call(chat(stream=True)) as call:
        await call.until(": keep-alive")
        said_something.set()
        await call.until("[DONE]")
    assert call.answer.status == 200
    assert joined(chunks(events(call.answer.text))) == "late"


async def only_comments(received: Received) -> None:
    await received.begin_stream()
    while True:
        await received.piece(b": still there\n\n")
        await asyncio.sleep(0.05)


async def test_comments_do_not_keep_a_stream_alive_for_ever():
    upstreams = [Upstream([in_turn(only_comments, streams("a b"))]) for _ in range(2)]
    upstreams[1].scripts = upstreams[0].scripts
    async with staged(*upstreams) as stage:
        answer = await stage.post(chat(stream=True))
        first, second = stage.last.receipts()
    assert joined(chunks(events(answer.text))) == "a b"
    assert first.lost == "stalled"
    assert second.lost is None


async def test_comments_behind_a_whole_answer_do_not_hold_it_up(monkeypatch):
    monkeypatch.setattr("gateway.remote.streaming._USAGE_S", 0.1)

    async def script(received: Received) -> None:
        await received.begin_stream()
        await received.piece(sse(chunk("a"), chunk(finish="stop")))
        while True:
            await received.piece(b": still there\n\n")
            await asyncio.sleep(0.02)

    async with staged(Upstream([script])) as stage:
        answer = await stage.post(chat(stream=True))
        [receipt] = stage.last.receipts()
    assert joined(chunks(events(answer.text))) == "a"
    assert receipt.lost is None


@pytest.mark.parametrize("stream", [True, False])
async def test_a_tenant_that_sees_no_receipt_learns_of_no_server(stream):
    upstream = Upstream([streams() if stream else answers(200, whole())])
    async with staged(upstream) as stage:
        answer = await stage.post(chat(stream=stream), who=tenant(sees_receipt=False))
    assert answer.status == 200
    assert not [name for name in answer.headers if name.startswith("x-forebay")]
    assert str(upstream.port) not in str(answer.headers)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"choices": [{"index": 0, "x": %b}]}', 502),
        (b'{"error": {"code": 400, "message": "no", "x": %b}}', 400),
    ],
)
async def test_an_answer_that_can_be_read_and_not_written_is_judged(body, status):
    """JSON may be nested deeper where it is read than where it is written."""
    nested = b"[" * 300 + b"]" * 300
    async with staged(Upstream([answers(200, body % nested)])) as stage:
        answer = await stage.post(chat())
    assert answer.status == status
    own = stage.router.members[0].load.own()
    assert (own.waiting, own.running) == (0, 0)


@pytest.mark.parametrize("depth", [300, 1020])
async def test_a_chunk_that_can_be_read_and_not_written_is_no_answer(depth):
    plain = json.dumps(chunk("a", extra=[]))
    nested = plain.replace("[]", "[" * depth + "]" * depth)

    async def script(received: Received) -> None:
        await received.begin_stream()
        await received.piece(sse(nested, chunk(finish="stop"), "[DONE]"))
        await received.end_stream()

    async with staged(Upstream([script])) as stage:
        answer = await stage.post(chat(stream=True))
        own = stage.router.members[0].load.own()
    assert answer.status == 502
    assert (own.waiting, own.running) == (0, 0)


async def test_a_choice_is_not_finished_by_an_empty_reason():
    async def script(received: Received) -> None:
        await received.begin_stream()
        await received.piece(sse(chunk("The quick", finish="")))
        received.reset()

    async with staged(Upstream([script, streams("The quick brown fox")])) as stage:
        answer = await stage.post(chat(stream=True))
    assert joined(chunks(events(answer.text))) == "The quick brown fox"


async def test_a_client_that_does_not_read_makes_no_token_late():
    may_go_on, said_all = asyncio.Event(), asyncio.Event()

    async def script(received: Received) -> None:
        await received.begin_stream()
        await received.piece(sse(chunk("a")))
        await may_go_on.wait()
        for _ in range(10):
            await received.piece(sse(chunk("b")))
        await received.piece(sse(chunk(finish="stop"), usage_chunk(20, 11), "[DONE]"))
        await received.end_stream()
        said_all.set()

    async with staged(Upstream([script])) as stage:
        async with stage.call(chat(stream=True)) as call:
            await call.until('"a"')
            call.stop_reading()
            may_go_on.set()
            await said_all.wait()
            for _ in range(5):  # turns of the loop, in which what was said arrives
                await asyncio.sleep(0.01)
            reads_on_s = monotonic()
            call.read_on()
            await call.until("[DONE]")
        assert stage.last.last_token_s is not None
        assert stage.last.last_token_s < reads_on_s
