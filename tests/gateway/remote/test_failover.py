"""Servers that close, stall, send garbage or errors, before content and in the middle of it."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from gateway.dispatch.member import Condition
from gateway.remote.probes import ProbeTimes
from gateway.remote.replica import RemoteTimes
from tests.gateway.remote.remote_stage import FAST, KEY, chat, staged
from tests.gateway.remote.upstream import (
    Received,
    Script,
    Upstream,
    answers,
    breaks_after,
    chunk,
    fail,
    in_turn,
    sse,
    streams,
    usage_chunk,
    whole,
    words,
)
from tests.gateway.stage import chunks, events, eventually, joined

TEXT = "one two three four five six"
MOMENTS = ["reset", "close", "stall", "garbage", "error event", "done early"]


async def resets(received: Received) -> None:
    received.reset()


async def stalls(received: Received) -> None:
    await received.gone()


async def sends_garbage(received: Received) -> None:
    await received.write(b"\x00\x01 this is not HTTP\r\n\r\n")


async def html(received: Received) -> None:
    await received.answer(200, b"<html>", "text/html")


async def head_only(received: Received) -> None:
    await received.begin_stream()
    await received.gone()


async def huge_header(received: Received) -> None:
    await received.answer(200, whole(), x_filler="x" * 100_000)


async def many_headers(received: Received) -> None:
    await received.answer(200, whole(), **{f"x_{i}": "x" for i in range(1000)})


async def encoded(received: Received) -> None:
    await received.answer(200, b"\x1f\x8b", content_encoding="gzip")


BEFORE_CONTENT: list[Script] = [
    resets,
    stalls,
    sends_garbage,
    html,
    huge_header,
    many_headers,
    encoded,
    answers(500, {"error": {"message": "boom"}}),
    answers(502, b"<html>bad gateway</html>"),
    answers(503, {"error": {"message": "loading"}}),
]


@pytest.mark.parametrize("script", BEFORE_CONTENT)
@pytest.mark.parametrize("stream", [True, False])
async def test_before_content_another_server_is_asked(script, stream):
    good = streams(TEXT) if stream else answers(200, whole(TEXT))
    # a connection that is reset without an answer is tried once more before that
    twice = [script, script] if script is resets else [script]
    turns = in_turn(*twice, good)
    async with staged(Upstream([turns]), Upstream([turns])) as stage:
        answer = await stage.post(chat(stream=stream))
        assert answer.status == 200, answer.text
        text = (
            joined(chunks(events(answer.text)))
            if stream
            else answer.json["choices"][0]["message"]["content"]
        )
    assert text == TEXT
    first, second, *_ = stage.last.receipts()
    assert first.lost is not None
    assert second.moved_from == first.candidate.name
    assert second.candidate.name != first.candidate.name


@pytest.mark.parametrize("script", [head_only, breaks_after(0)])
async def test_a_stream_that_ends_before_content_is_asked_for_elsewhere(script):
    turns = in_turn(script, streams(TEXT))
    async with staged(Upstream([turns]), Upstream([turns])) as stage:
        answer = await stage.post(chat(stream=True))
    found = chunks(events(answer.text))
    assert joined(found) == TEXT
    roles = [c for part in found for c in part["choices"] if "role" in c["delta"]]
    assert len(roles) == 1


@pytest.mark.parametrize("how", MOMENTS)
@pytest.mark.parametrize("after", [1, 6])
async def test_in_the_middle_the_stream_goes_on_unseen(how, after):
    turns = in_turn(breaks_after(after, TEXT, how), streams(TEXT))
    async with staged(Upstream([turns]), Upstream([turns])) as stage:
        answer = await stage.post(chat(stream=True, stream_options={"include_usage": True}))
        await stage.serving()
    found = chunks(events(answer.text))
    assert joined(found) == TEXT
    assert {part["id"] for part in found} == {"up-1"}
    roles = [c for part in found for c in part["choices"] if "role" in c["delta"]]
    assert len(roles) == 1
    reasons = [c["finish_reason"] for part in found for c in part["choices"]]
    assert reasons.count("stop") == 1
    assert sum(bool(part.get("usage")) for part in found) == 1
    assert stage.last.usage().completion_tokens == 6
    assert stage.last.usage().prompt_tokens == 20
    seeds = {u.received[0].body["seed"] for u in stage.upstreams if u.received}
    assert len(seeds) == 1


async def test_the_other_servers_pieces_may_be_cut_elsewhere():
    async def by_characters(received: Received) -> None:
        await received.begin_stream()
        for character in TEXT:
            await received.piece(sse(chunk(character)))
        await received.piece(sse(chunk(finish="stop"), "[DONE]"))
        await received.end_stream()

    turns = in_turn(breaks_after(3, TEXT), by_characters)
    async with staged(Upstream([turns]), Upstream([turns])) as stage:
        answer = await stage.post(chat(stream=True))
    assert joined(chunks(events(answer.text))) == TEXT


@pytest.mark.parametrize("other", ["one two THREE four", "one"])
async def test_another_text_is_one_error_event_and_no_done(other):
    turns = in_turn(breaks_after(3, TEXT), streams(other))
    async with staged(Upstream([turns]), Upstream([turns])) as stage:
        answer = await stage.post(chat(stream=True))
    *found, last = events(answer.text)
    assert joined(found) == "one two three"
    assert last["error"]["type"] == "server_error"
    assert "[DONE]" not in answer.text
    assert "stop" not in answer.text
    assert answer.closed
    assert stage.last.usage().completion_tokens == 3


async def test_without_another_server_the_same_one_is_asked_again():
    async with staged(Upstream([breaks_after(2, TEXT), streams(TEXT)])) as stage:
        answer = await stage.post(chat(stream=True))
    assert joined(chunks(events(answer.text))) == TEXT


async def test_a_server_that_is_found_down_before_it_is_asked_again_is_waited_for(monkeypatch):
    monkeypatch.setattr("gateway.remote.course._SAME_AGAIN_S", 0.5)

    async def dies(received: Received) -> None:
        upstream.models_status = 500
        await breaks_after(2, TEXT)(received)

    upstream = Upstream([dies, streams(TEXT)])
    async with staged(upstream, routing={"moves": 3, "recovery_s": 5.0}) as stage:
        wait_until_serving = stage.router.wait_until_serving

        async def comes_back(timeout_s: float) -> bool:
            upstream.models_status = 200
            return await wait_until_serving(timeout_s)

        monkeypatch.setattr(stage.router, "wait_until_serving", comes_back)
        answer = await stage.post(chat(stream=True))
    assert joined(chunks(events(answer.text))) == TEXT


async def test_moves_are_bounded():
    bad = Upstream([breaks_after(1, TEXT)])
    async with staged(bad, routing={"moves": 2, "recovery_s": 1.0}) as stage:
        answer = await stage.post(chat(stream=True))
    *_, last = events(answer.text)
    assert last["error"]["code"] == "engine_unavailable"
    assert len(bad.received) == 3


async def test_a_server_that_is_lost_twice_over_replays_twice():
    scripts = [breaks_after(2, TEXT), breaks_after(4, TEXT), streams(TEXT)]
    async with staged(Upstream(scripts)) as stage:
        answer = await stage.post(chat(stream=True))
    assert joined(chunks(events(answer.text))) == TEXT
    assert len(stage.last.receipts()) == 3


async def test_a_text_that_is_whole_needs_no_other_server():
    async def script(received: Received) -> None:
        await received.begin_stream()
        await received.piece(sse(chunk("a"), chunk(finish="stop")))
        received.reset()

    async with staged(upstream := Upstream([script])) as stage:
        answer = await stage.post(chat(stream=True))
    assert joined(chunks(events(answer.text))) == "a"
    assert len(upstream.received) == 1


async def test_tool_calls_go_on_under_their_first_ids():
    def call(**fields: object) -> dict:
        parts = chunk()
        parts["choices"][0]["delta"] = {"tool_calls": [{"index": 0, **fields}]}
        return parts

    def script(call_id: str, cut: int | None) -> Script:
        async def run(received: Received) -> None:
            await received.begin_stream()
            opening = {"name": "f", "arguments": ""}
            await received.piece(sse(call(id=call_id, type="function", function=opening)))
            for piece in ['{"a"', ": 1", ', "b"', ": 2}"][:cut]:
                await received.piece(sse(call(function={"arguments": piece})))
            if cut is not None:
                return await fail(received, "reset")
            await received.piece(sse(chunk(finish="tool_calls"), "[DONE]"))
            return await received.end_stream()

        return run

    turns = in_turn(script("first", 2), script("second", None))
    async with staged(Upstream([turns]), Upstream([turns])) as stage:
        answer = await stage.post(chat(stream=True, tools=[{}]))
    deltas = [c["delta"] for part in chunks(events(answer.text)) for c in part["choices"]]
    calls = [one for delta in deltas for one in delta.get("tool_calls", [])]
    assert [one["id"] for one in calls if "id" in one] == ["first"]
    assert json.loads("".join(one["function"].get("arguments", "") for one in calls)) == {
        "a": 1,
        "b": 2,
    }


async def test_a_finished_choice_is_not_told_again():
    def script(cut: bool) -> Script:
        async def run(received: Received) -> None:
            await received.begin_stream()
            await received.piece(sse(chunk("a"), chunk("x", index=1), chunk(finish="stop")))
            if cut:
                return received.reset()
            await received.piece(sse(chunk("y", index=1), chunk(finish="stop", index=1)))
            await received.piece(sse(usage_chunk(3, 3), "[DONE]"))
            return await received.end_stream()

        return run

    turns = in_turn(script(True), script(False))
    async with staged(Upstream([turns]), Upstream([turns])) as stage:
        answer = await stage.post(chat(stream=True, n=2))
    found = chunks(events(answer.text))
    assert (joined(found, 0), joined(found, 1)) == ("a", "xy")
    assert sum(c["finish_reason"] is not None for part in found for c in part["choices"]) == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_nobody_left_is_a_503_as_long_as_nothing_was_said(stream):
    async with staged(Upstream([resets]), Upstream([resets])) as stage:
        answer = await stage.post(chat(stream=stream))
    assert answer.status == 503
    assert answer.json["error"]["code"] == "engine_unavailable"
    assert answer.headers["retry-after"] == "1"


async def test_a_request_that_breaks_two_servers_is_not_tried_on_a_third():
    broken = [Upstream([answers(500, {})]) for _ in range(3)]
    async with staged(*broken) as stage:
        answer = await stage.post(chat())
        assert answer.status == 502
        assert sum(len(upstream.received) for upstream in broken) == 2
        assert sum(not member.breaker.closed for member in stage.router.members) == 0


async def test_full_servers_are_well_and_the_wait_is_theirs():
    full = answers(429, {"error": {"message": "slow down"}}, retry_after="7")
    upstreams = [Upstream([full]) for _ in range(3)]
    async with staged(*upstreams) as stage:
        for _ in range(4):
            answer = await stage.post(chat(stream=True))
            assert answer.status == 503
            assert answer.headers["retry-after"] == "7"
        assert all(member.breaker.closed for member in stage.router.members)
    assert sum(len(upstream.received) for upstream in upstreams) == 8


@pytest.mark.parametrize("body", [{}, [], {"error": {"code": ["draining"]}}])
async def test_a_full_server_sends_the_request_to_another(body):
    turns = in_turn(answers(503, body, retry_after="2"), answers(200, whole()))
    async with staged(Upstream([turns]), Upstream([turns])) as stage:
        answer = await stage.post(chat())
        assert answer.status == 200
        assert stage.last.receipts()[0].lost == "full"


@pytest.mark.parametrize("status", [401, 403, 404, 302])
async def test_a_server_that_does_not_know_us_is_our_mistake(status):
    wrong = [Upstream([answers(status, {})], models_status=401) for _ in range(2)]
    async with staged(*wrong, routing={"moves": 3, "recovery_s": 0.05}) as stage:
        for replica in stage.replicas:
            replica._set_health(type(replica.health())(Condition.SERVING))
        answer = await stage.post(chat())
        assert answer.status in (502, 503)
        assert {replica.health().condition for replica in stage.replicas} == {Condition.DOWN}


async def test_one_misconfigured_server_leaves_the_others():
    upstreams = [Upstream([answers(401, {}), answers(200, whole())]) for _ in range(2)]
    async with staged(*upstreams) as stage:
        answer = await stage.post(chat())
        assert answer.status == 200


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_clients_mistake_is_told_with_its_status_and_without_addresses(status):
    port = 0

    async def script(received: Received) -> None:
        message = (
            f"served at http://10.1.2.3:80/v1 or 127.0.0.1:{port} says\x00: x{KEY}x "
            f"{received.headers['authorization']} by served {'x' * 5000}"
        )
        error = {"message": message, "type": "BadRequestError", "param": "top_k"}
        await received.answer(status, {"error": {**error, "code": status}})

    upstream = Upstream([script])
    async with staged(upstream, Upstream([script])) as stage:
        port = upstream.port
        for stream in (True, False):
            answer = await stage.post(chat(stream=stream))
            assert answer.status == status
            error = answer.json["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["param"] == "top_k"
            assert len(error["message"]) <= 2000
            for secret in ("10.1.2.3", "127.0.0.1", "sk-upstream", "http://", "\x00", "served"):
                assert secret not in error["message"]
        assert len(stage.last.receipts()) == 1
        assert all(member.breaker.closed for member in stage.router.members)


async def test_leaving_closes_the_servers_connection_at_once():
    gone = []

    async def script(received: Received) -> None:
        await received.begin_stream()
        for piece in words(TEXT)[:3]:
            await received.piece(sse(chunk(piece)))
        await received.gone()
        gone.append("stream")

    async def silent(received: Received) -> None:
        await received.gone()
        gone.append("silent")

    async with staged(Upstream([script, silent, silent])) as stage:
        async with stage.call(chat(stream=True)) as call:
            await call.until("three")
        await eventually(lambda: gone == ["stream"])
        async with stage.call(chat(stream=True)), stage.call(chat()):
            await eventually(lambda: len(stage.upstreams[0].received) == 3)
        await eventually(lambda: gone == ["stream", "silent", "silent"])
        [member] = stage.router.members
        assert member.load.sequences == 0
        assert stage.replicas[0]._connections.open_exchanges == 0
        own = stage.replicas[0].own_load
        assert (own.waiting, own.running) == (0, 0)
    assert stage.requests[0].usage().completion_tokens == 3


async def test_a_server_that_hangs_is_found_out_by_its_probes():
    hung, well = Upstream([breaks_after(2, TEXT, "stall")]), Upstream([streams(TEXT)])
    slow = RemoteTimes(first_s=30, between_s=30, probes=FAST.probes)
    async with staged(hung, well, times=slow) as stage:
        while not hung.received:
            async with stage.call(chat(stream=True)) as call:
                await call.until("two")
                if not hung.received:
                    continue
                hung.silent = True
                await call.until("[DONE]")
                assert joined(chunks(events(call.answer.text))) == TEXT
        assert Condition.DOWN in {replica.health().condition for replica in stage.replicas}


async def test_a_server_that_only_takes_no_more_connections_ends_its_streams():
    """As one that is being stopped does: its probes fail, what runs there goes on."""
    rest = asyncio.Event()

    async def script(received: Received) -> None:
        await received.begin_stream()
        await received.piece(sse(chunk("a")))
        await rest.wait()
        await received.piece(sse(chunk("b"), chunk(finish="stop"), "[DONE]"))
        await received.end_stream()

    upstream = Upstream([script])
    patient = RemoteTimes(first_s=30, between_s=30, probes=FAST.probes)
    async with staged(upstream, times=patient) as stage, stage.call(chat(stream=True)) as call:
        await call.until('"a"')
        upstream.models_status = 503
        await eventually(lambda: stage.replicas[0].health().condition is Condition.DOWN)
        rest.set()
        await call.until("[DONE]")
        assert joined(chunks(events(call.answer.text))) == "ab"
    assert len(stage.last.receipts()) == 1


async def test_a_client_that_leaves_with_the_end_has_got_it_all():
    """The server's connection may still be open then; the request is over all the same."""

    async def script(received: Received) -> None:
        await received.begin_stream()
        await received.piece(sse(chunk("a"), chunk(finish="stop"), usage_chunk(7, 1), "[DONE]"))
        await received.gone()

    async with staged(upstream := Upstream([script])) as stage:
        async with stage.call(chat(stream=True)) as call:
            await call.until("[DONE]")
        assert stage.last.usage().prompt_tokens == 7
        assert stage.router.members[0].load.sequences == 0
        connections = stage.replicas[0]._connections
        await eventually(lambda: connections.open_exchanges == 0)
        assert len(upstream.received) == 1


async def test_what_was_generated_for_a_client_that_left_is_counted():
    async with staged(Upstream([breaks_after(3, TEXT, "stall")])) as stage:
        async with stage.call(chat(stream=True)) as call:
            await call.until("three")
        assert stage.last.usage().completion_tokens == 3
        assert stage.last.usage().prompt_tokens > 0


async def test_a_refused_request_does_not_make_a_server_cold():
    async with staged(Upstream([answers(404, {}), answers(200, whole())])) as stage:
        answer = await stage.post(chat())
        assert answer.status == 200
        assert stage.restarts == 0
        assert stage.router.members[0].breaker.closed


@pytest.mark.parametrize("why", ["draining", "loading"])
async def test_servers_that_come_and_go_leave_a_third_and_are_looked_at_at_once(why):
    away = answers(503, {"error": {"message": "Not now.", "code": why}}, retry_after="5")
    turns = in_turn(away, away, answers(200, whole()))
    upstreams = [Upstream([turns]) for _ in range(3)]
    seldom = RemoteTimes(probes=ProbeTimes(every_s=600.0))
    async with staged(*upstreams, times=seldom) as stage:
        before = [len(upstream.probes) for upstream in upstreams]
        assert (await stage.post(chat())).status == 200
        first, second, third = stage.last.receipts()
        assert [first.lost, second.lost, third.lost] == [why, why, None]
        assert all(member.breaker.closed for member in stage.router.members)
        names = [replica.name for replica in stage.replicas]
        passed_by = [names.index(receipt.candidate.name) for receipt in (first, second)]
        await eventually(lambda: all(len(upstreams[at].probes) > before[at] for at in passed_by))


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "too many of them", "code": 400, "type": "BadRequestError"}},
        {"object": "error", "message": "too many of them", "code": 400, "type": "BadRequestError"},
    ],
)
async def test_a_clients_mistake_that_is_told_under_a_200_is_its_own(body):
    upstreams = [Upstream([answers(200, body)]) for _ in range(2)]
    async with staged(*upstreams) as stage:
        answer = await stage.post(chat())
        assert answer.status == 400
        assert answer.json["error"]["message"] == "too many of them"
    assert sum(len(upstream.received) for upstream in upstreams) == 1


async def test_an_error_under_a_200_that_is_the_servers_is_asked_for_elsewhere():
    broken = answers(200, {"error": {"message": "CUDA error", "code": 500}})
    turns = in_turn(broken, answers(200, whole()))
    async with staged(Upstream([turns]), Upstream([turns])) as stage:
        assert (await stage.post(chat())).status == 200
        assert stage.last.receipts()[0].lost == "server error"


@pytest.mark.parametrize(("status", "told"), [(429, 503), (400, 400), (401, 502)])
async def test_a_status_counts_whatever_its_body_is_written_in(status, told):
    async def script(received: Received) -> None:
        await received.answer(
            status, gzip.compress(b"{}"), content_encoding="gzip", retry_after="7"
        )

    async with staged(Upstream([script]), routing={"moves": 3, "recovery_s": 0.05}) as stage:
        answer = await stage.post(chat())
        assert answer.status == told
        if status == 429:
            assert answer.headers["retry-after"] == "7"
            assert stage.router.members[0].breaker.closed


async def test_a_status_whose_body_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("gateway.remote.attempt._EXPLANATION_S", 0.02)

    async def script(received: Received) -> None:
        await received.write(b"HTTP/1.1 429 X\r\ncontent-length: 100\r\n\r\n{")
        await received.gone()

    async with staged(Upstream([script])) as stage:
        async with asyncio.timeout(2):
            answer = await stage.post(chat())
        assert answer.status == 503
        assert stage.router.members[0].breaker.closed
