"""Answers of a chat, for the fake server to give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtest.live.stream import StreamReader
from loadtest.plan import Session, Turn
from loadtest.target import Target
from loadtest.wire.connection import Endpoint
from tests.loadtest.bench.test_completion import sse
from tests.loadtest.fake_server import Call, Reply, usage_event

DONE = b"[DONE]"


def chat_event(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    """One chunk of a chat completion."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def read_of(*events: tuple[float, bytes | dict[str, Any]]) -> StreamReader:
    """What is read of events that came at these times."""
    reader = StreamReader()
    for at_s, event in events:
        reader.take(at_s, sse(event))
    return reader


def said(text: str) -> dict[str, str]:
    """A user's message."""
    return {"role": "user", "content": text}


def completion(tokens: Sequence[int] = (5, 6, 7), output_tokens: int = 2, **more: Any) -> Session:
    """A session of one completion."""
    return Session((Turn(output_tokens, tokens=tokens, **more),))


def target_at(endpoint: Endpoint, timeout_s: float = 5.0) -> Target:
    """The fake server as a target."""
    return Target("fake", endpoint, "m", timeout_s=timeout_s)


async def answer_chat(call: Call, reply: Reply) -> None:
    """One token for each of those that may come: the number of messages so far, and dots."""
    most = call.body["max_tokens"]
    await reply.head(content_type="text/event-stream", transfer_encoding="chunked")
    await reply.event(chat_event(role="assistant", content=""))
    for place in range(most):
        text = str(len(call.body["messages"])) if place == 0 else "."
        await reply.event(chat_event("length" if place == most - 1 else None, content=text))
    await reply.event(usage_event(10, most))
    await reply.event(DONE)
    await reply.chunk(b"")
