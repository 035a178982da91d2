"""One client's requests do not close a model to the others."""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway.dispatch.member import Condition
from gateway.remote.failures import Cleaner
from tests.gateway.remote.remote_stage import chat, staged
from tests.gateway.remote.upstream import Received, Upstream, chunk, sse, whole


def poisoned(received: Received) -> bool:
    return "poison" in str(received.body["messages"])


async def fails(received: Received) -> None:
    if poisoned(received):
        await received.answer(500, {"error": {"message": "no such template"}})
    else:
        await received.answer(200, whole())


async def says_nonsense(received: Received) -> None:
    if poisoned(received):
        await received.answer(200, {"object": "chat.completion"})
    else:
        await received.answer(200, whole())


async def filters(received: Received) -> None:
    if poisoned(received):
        await received.answer(403, {"error": {"message": "flagged", "type": "moderation"}})
    else:
        await received.answer(200, whole())


@pytest.mark.parametrize("script", [fails, says_nonsense, filters])
@pytest.mark.parametrize("servers", [1, 2])
async def test_a_request_that_no_server_can_answer_is_its_clients_alone(script, servers):
    upstreams = [Upstream([script]) for _ in range(servers)]
    async with staged(*upstreams) as stage:
        for _ in range(4):
            assert (await stage.post(chat("poison"))).status == 502
        assert all(member.breaker.opened == 0 for member in stage.router.members)
        assert all(r.health().condition is Condition.SERVING for r in stage.replicas)
        assert (await stage.post(chat("hi"))).status == 200


async def test_a_stream_that_stalls_everywhere_is_tried_twice():
    async def stalls(received: Received) -> None:
        if not received.body.get("stream"):
            await received.answer(200, whole())
            return
        await received.begin_stream()
        await received.piece(sse(chunk("a")))
        await received.gone()

    upstreams = [Upstream([stalls]), Upstream([stalls])]
    async with staged(*upstreams) as stage:
        answers = await asyncio.gather(*(stage.post(chat(stream=True)) for _ in range(4)))
        assert all("upstream_error" in answer.text for answer in answers)
        assert all(member.breaker.opened == 0 for member in stage.router.members)
        assert (await stage.post(chat())).status == 200


async def test_a_server_that_fails_what_another_answers_is_left_alone():
    async def broken(received: Received) -> None:
        await received.answer(500, {"error": {"message": "CUDA error"}})

    async def well(received: Received) -> None:
        await received.answer(200, whole())

    async with staged(Upstream([broken]), Upstream([well])) as stage:
        member = stage.router.find(stage.replicas[0].name)
        for _ in range(20):
            assert (await stage.post(chat())).status == 200
            if member.breaker.opened:
                break
    assert member.breaker.opened


async def one_huge_event(received: Received) -> None:
    await received.begin_stream()
    for _ in range(20):
        await received.piece(b"data: " + b"x" * 100_000)
    await received.gone()


async def a_huge_body(received: Received) -> None:
    await received.answer(200, whole("x" * 5000))


@pytest.mark.parametrize("script", [one_huge_event, a_huge_body])
async def test_more_than_the_gateway_takes_is_asked_for_once_and_blames_nobody(script, monkeypatch):
    monkeypatch.setattr("gateway.remote.whole.MAX_ANSWER_BYTES", 4096)
    upstreams = [Upstream([script]), Upstream([script])]
    stream = script is one_huge_event
    async with staged(*upstreams) as stage:
        answers = [await stage.post(chat(stream=stream)) for _ in range(4)]
        assert {answer.status for answer in answers} == {502}
        assert {answer.json["error"]["code"] for answer in answers} == {"upstream_error"}
        assert sum(len(upstream.received) for upstream in upstreams) == len(answers)
        assert all(member.breaker.opened == 0 for member in stage.router.members)
        assert all(member.load.sequences == 0 for member in stage.router.members)


async def test_an_error_that_is_too_long_still_says_whose_it_is():
    async def refuses(received: Received) -> None:
        await received.answer(400, {"error": {"message": "x" * 100_000}})

    async with staged(Upstream([refuses])) as stage:
        answer = await stage.post(chat())
    assert answer.status == 400
    assert answer.json["error"]["message"] == "The model's server refuses this request."


@pytest.mark.parametrize("word", ["a", "a.", "sk-", "[0", "1.", "http://", "bearer "])
def test_a_long_message_takes_no_time(word):
    cleaner = Cleaner(secrets=["key"], hosts=["h:1", "h"], served_model="s", model="m")
    began_s = time.perf_counter()
    cleaner.text(word * (65_536 // len(word)))
    assert time.perf_counter() - began_s < 0.5


@pytest.mark.parametrize(
    "text", ["at http://10.0.0.1:80/x", "athttps://box/x", "x" * 40 + "tcp://b"]
)
def test_addresses_are_still_hidden(text):
    cleaner = Cleaner(secrets=[], hosts=["h"], served_model="s", model="m")
    assert "://" not in cleaner.text(text)
