"""Answers to HTTP/1.0, whose clients know no chunks: an answer of unknown length ends with its
connection (RFC 9112, 6.1 and 6.3)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def until_close(
    cycle: RequestResponseCycle,
) -> Callable[[ASGISendEvent], Coroutine[Any, Any, None]]:
    """How to send this request's answer. The cycle closes the connection behind each of HTTP/1.0's,
    but would send what has no length in chunks."""
    send = cycle.send
    measured = True

    async def send_until_close(message: ASGISendEvent) -> None:
        nonlocal measured
        if message["type"] == "http.response.start":
            measured = any(name == b"content-length" for name, _ in message.get("headers", []))
            if not measured:
                cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and not measured:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_until_close
