"""The stub upstream: what it answers, and that each token of a stream is a write of its own."""

from __future__ import annotations

import orjson
import pytest

from loadtest.campaign import CampaignError
from loadtest.connection import Answer, Endpoint, connect
from loadtest.routing_bench_proxy import (
    CASES,
    MODEL,
    ONE_EVENT,
    SIXTEEN_EVENTS,
    WHOLE,
    ProxyPlan,
    chat_body,
    complaint,
    measure_proxy,
    proxy_config,
    running_stub,
)
from loadtest.stub_server import PROMPT_TOKENS, WORD


async def ask(endpoint: Endpoint, path: str, body: bytes) -> Answer:
    async with connect(endpoint) as connection:
        return await connection.exchange(endpoint.request("POST", path, body), 5.0)


async def test_it_answers_whole_and_event_by_event() -> None:
    async with running_stub() as stub:
        answers = [await ask(stub, "/v1/chat/completions", chat_body(case)) for case in CASES]
        text = {"model": MODEL, "prompt": "x", "max_tokens": 2, "stream": True}
        text["stream_options"] = {"include_usage": True}
        completion = await ask(stub, "/v1/completions", orjson.dumps(text))
        nothing = await ask(stub, "/v1/nothing", b"{}")

    assert [complaint(answer, case) for answer, case in zip(answers, CASES, strict=True)] == [
        None,
        None,
        None,
    ]
    whole = orjson.loads(answers[0].body)
    assert whole["choices"][0]["message"]["content"] == WORD * WHOLE.tokens
    assert whole["usage"]["prompt_tokens"] == PROMPT_TOKENS
    assert answers[2].body.count(b"data: ") == SIXTEEN_EVENTS.tokens + 1
    # reads may join what was written apart, but not all of it
    assert len(answers[2].arrivals) > 1
    events = [orjson.loads(line[6:]) for line in completion.body.split(b"\n\n")[:-2]]
    assert [event["choices"][0]["text"] for event in events[:2]] == [WORD, WORD]
    assert events[2]["usage"]["completion_tokens"] == 2
    assert nothing.status == 404


def test_an_answer_that_is_not_the_stubs_is_told() -> None:
    def answer(body: bytes, status: int = 200, whole: bool = True) -> Answer:
        return Answer(status, {}, [(0.0, body)] and [_piece(body)], 0.0, 0.0, whole)

    good = b'data: {"choices":[{"delta":{"content":"token "}}]}\n\ndata: [DONE]\n\n'
    assert complaint(answer(good), ONE_EVENT) is None
    assert complaint("no connection", ONE_EVENT) == "no connection"
    assert complaint(answer(b'{"error":{"message":"full"}}', 503), ONE_EVENT) == "status 503: full"
    assert complaint(answer(good, whole=False), ONE_EVENT) == "an answer is not whole"
    assert complaint(answer(good), SIXTEEN_EVENTS) == "an answer is not whole"
    assert complaint(answer(good[:-14]), ONE_EVENT) == "a stream has no end"


async def test_a_pair_of_rounds_for_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a gateway that is another stub: it adds next to nothing, and takes the same
    requests."""
    started: list[str] = []

    def instead(*_: object, config: str, flags: tuple[str, ...] = ()) -> object:
        started.append(" ".join(flags) or config)
        return _as_a_server()

    monkeypatch.setattr("loadtest.routing_bench_proxy.running_forebay", instead)
    monkeypatch.setattr("loadtest.routing_bench_proxy._until_all_are_ready", _at_once)
    plan = ProxyPlan(rounds=2, alone_requests=3, crowd_requests=8, crowd=4)
    figures = await measure_proxy(lambda _: None, plan)

    assert [(one.case, one.concurrency) for one in figures[:6]] == [
        (case.name, concurrency) for case in CASES for concurrency in (1, 4)
    ]
    assert all(one.proxied_ms.count == one.direct_ms.count for one in figures)
    assert figures[1].proxied_ms.count == 16
    assert all(one.proxied_per_s > 0 for one in figures)
    assert "engine: openai, shared_cache: accept" in started[0]


async def test_a_server_that_answers_otherwise_ends_it() -> None:
    from loadtest.client import Target
    from loadtest.routing_bench_proxy import _round
    from tests.loadtest.fake_server import Call, Reply, fake_server

    async def refuse(_: Call, reply: Reply) -> None:
        await reply.whole(503, b'{"error":{"message":"no room"}}')

    async with fake_server(refuse) as server:
        target = Target("forebay", server.endpoint, MODEL)
        with pytest.raises(CampaignError, match="forebay: status 503: no room"):
            await _round(target, WHOLE, 1, 1)


def test_the_configuration_names_every_upstream() -> None:
    config = proxy_config([Endpoint("127.0.0.1", 1, "/v1"), Endpoint("127.0.0.1", 2, "/v1")])
    assert "http://127.0.0.1:1/v1" in config
    assert "http://127.0.0.1:2/v1" in config
