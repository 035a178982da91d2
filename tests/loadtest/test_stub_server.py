"""The stub upstream: what it answers, whole and event by event."""

from __future__ import annotations

import orjson

from loadtest.bench.routing_proxy import (
    CASES,
    MODEL,
    SIXTEEN_EVENTS,
    WHOLE,
    chat_body,
    complaint,
    running_stub,
)
from loadtest.stub_server import PROMPT_TOKENS, WORD
from loadtest.wire.connection import Answer, Endpoint, connect


async def ask(endpoint: Endpoint, path: str, body: bytes) -> Answer:
    async with connect(endpoint) as connection:
        return await connection.exchange(endpoint.request("POST", path, body), 5.0)


async def test_it_answers_whole_and_event_by_event() -> None:
    async with running_stub() as stub:
        answers = [await ask(stub, "/v1/chat/completions", chat_body(case)) for case in CASES]
        prompt = {"model": MODEL, "prompt": "x", "max_tokens": 2, "stream": True}
        prompt["stream_options"] = {"include_usage": True}
        completion = await ask(stub, "/v1/completions", orjson.dumps(prompt))
        newer = await ask(stub, "/v1/chat/completions", b'{"max_completion_tokens": 3}')
        models = await ask(stub, "/v1/models", b"")
        health = await ask(stub, "/health", b"")
        nothing = await ask(stub, "/v1/nothing", b"{}")

    complaints = [complaint(answer, case) for answer, case in zip(answers, CASES, strict=True)]
    assert complaints == [None, None, None]
    whole = orjson.loads(answers[0].body)
    assert whole["choices"][0]["message"]["content"] == WORD * WHOLE.tokens
    assert whole["usage"]["prompt_tokens"] == PROMPT_TOKENS
    assert answers[2].body.count(b"data: ") == SIXTEEN_EVENTS.tokens + 1
    events = [orjson.loads(line[6:]) for line in completion.body.split(b"\n\n")[:-2]]
    assert [event["choices"][0]["text"] for event in events[:2]] == [WORD, WORD]
    assert events[2]["usage"]["completion_tokens"] == 2
    assert orjson.loads(newer.body)["usage"]["completion_tokens"] == 3
    assert (models.status, health.status, nothing.status) == (200, 200, 404)
