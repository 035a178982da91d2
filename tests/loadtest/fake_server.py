"""A loopback server that speaks just enough of `/v1/completions` to be measured by a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from loadtest.wire.connection import Endpoint


@dataclass
class Call:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Reply:
    """Writes one answer, however well or badly a test wants it."""

    writer: asyncio.StreamWriter

    async def head(self, status: int = 200, **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} Reason"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode())
        await self.writer.drain()

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, payload: bytes | dict[str, Any]) -> None:
        text = payload if isinstance(payload, bytes) else orjson.dumps(payload)
        await self.chunk(b"data: " + text + b"\n\n")

    async def whole(self, status: int, body: bytes, **headers: str) -> None:
        await self.head(status, content_length=str(len(body)), **headers)
        await self.raw(body)


Behaviour = Callable[[Call, Reply], Awaitable[None]]


@dataclass
class FakeServer:
    """What a test sees of it: where it is, and every call and connection that it got."""

    endpoint: Endpoint
    calls: list[Call] = field(default_factory=list)
    connections: int = 0
    in_flight: int = 0
    most_in_flight: int = 0


@asynccontextmanager
async def fake_server(behave: Behaviour, key: str | None = None) -> AsyncIterator[FakeServer]:
    """Answers each request by `behave`; a behaviour that closes the writer ends the connection."""
    seen: FakeServer
    handlers: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        try:
            while not writer.is_closing() and (call := await _read_call(reader)):
                seen.calls.append(call)
                seen.in_flight += 1
                seen.most_in_flight = max(seen.most_in_flight, seen.in_flight)
                try:
                    await behave(call, Reply(writer))
                finally:
                    seen.in_flight -= 1
        except ConnectionError:
            pass  # The client has left.
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.ensure_future(serve(reader, writer)))

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    seen = FakeServer(Endpoint("127.0.0.1", listener.sockets[0].getsockname()[1], "/v1", key=key))
    try:
        yield seen
    finally:
        listener.close()
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


async def _read_call(reader: asyncio.StreamReader) -> Call | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    request, *lines = head.split("\r\n")[:-2]
    method, path, _ = request.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Call(method, path, headers, orjson.loads(body) if body else {})


def token_event(text: str, finish: str | None = None) -> dict[str, Any]:
    """One chunk of a completion."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None}


def usage_event(prompt_tokens: int, completion_tokens: int, cached: int | None = None) -> Any:
    """The last chunk, with the counts."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
    }
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"choices": [], "usage": usage}


async def answer_well(call: Call, reply: Reply) -> None:
    """A whole answer of the asked length, one token per event, nothing cached."""
    body = call.body
    await reply.head(content_type="text/event-stream", transfer_encoding="chunked")
    for index in range(body["max_tokens"]):
        last = index == body["max_tokens"] - 1
        await reply.event(token_event("x", "length" if last else None))
    await reply.event(usage_event(len(body["prompt"]), body["max_tokens"], 0))
    await reply.event(b"[DONE]")
    await reply.chunk(b"")
