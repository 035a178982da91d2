"""A scripted server that speaks OpenAI's API, well or badly, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Received:
    """One request, and the way to answer it byte by byte."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader
    fresh: bool

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(
        self, status: int, body: object, content_type: str = "application/json", **headers: str
    ) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} X", f"content-type: {content_type}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        lines.append(f"content-length: {len(data)}")
        await self.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)

    async def begin_stream(self, content_type: str = "text/event-stream") -> None:
        await self.write(
            f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\n"
            "transfer-encoding: chunked\r\n\r\n".encode()
        )

    async def piece(self, data: bytes) -> None:
        await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.write(b"0\r\n\r\n")

    def reset(self) -> None:
        """Close with an RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Wait until the client has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(1 << 16):
                pass


Script = Callable[[Received], Awaitable[None]]


def chunk(
    content: str | None = None,
    *,
    index: int = 0,
    finish: str | None = None,
    role: bool = False,
    **more: object,
) -> dict[str, Any]:
    """A chat chunk as vLLM writes it, under the server's own model name."""
    delta: dict[str, object] = {}
    if role:
        delta["role"] = "assistant"
    if content is not None:
        delta["content"] = content
    return {
        "id": "up-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "served",
        "choices": [{"index": index, "delta": delta, "finish_reason": finish}],
        **more,
    }


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    value: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached is not None:
        value["prompt_tokens_details"] = {"cached_tokens": cached}
    return value


def usage_chunk(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    return {**chunk(), "choices": [], "usage": usage(prompt, completion, cached)}


def sse(*values: object, end: bytes = b"\n\n") -> bytes:
    """Events; a string is sent as it is."""
    return b"".join(
        b"data: " + (value.encode() if isinstance(value, str) else json.dumps(value).encode()) + end
        for value in values
    )


def words(text: str) -> list[str]:
    """Pieces that join to the text again."""
    head, *rest = text.split(" ")
    return [head, *(" " + word for word in rest)]


def streams(text: str = "The quick brown fox", cached: int | None = 0) -> Script:
    """A whole and proper stream, chunk by chunk."""

    async def script(received: Received) -> None:
        await received.begin_stream()
        await received.piece(sse(chunk("", role=True)))
        pieces = words(text)
        for piece in pieces:
            await received.piece(sse(chunk(piece)))
        await received.piece(sse(chunk(finish="stop")))
        if received.body.get("stream_options", {}).get("include_usage"):
            await received.piece(sse(usage_chunk(20, len(pieces), cached)))
        await received.piece(sse("[DONE]"))
        await received.end_stream()

    return script


def breaks_after(pieces: int, text: str = "The quick brown fox", how: str = "reset") -> Script:
    """A stream that is lost after so many pieces of content."""

    async def script(received: Received) -> None:
        await received.begin_stream()
        await received.piece(sse(chunk("", role=True)))
        for piece in words(text)[:pieces]:
            await received.piece(sse(chunk(piece)))
        await fail(received, how)

    return script


async def fail(received: Received, how: str) -> None:
    """End an answer that has begun, badly."""
    if how == "reset":
        received.reset()
    elif how == "close":
        received.writer.close()
    elif how == "stall":
        await received.gone()
    elif how == "garbage":
        await received.piece(b"data: {nonsense\n\n")
        await received.gone()
    elif how == "error event":
        await received.piece(sse({"error": {"message": "CUDA at 10.0.0.7:80", "code": 500}}))
        await received.gone()
    elif how == "done early":
        await received.piece(sse("[DONE]"))
        await received.end_stream()
    else:
        raise ValueError(how)


def whole(text: str = "Hello", **more: object) -> dict[str, Any]:
    return {
        "id": "up-1",
        "object": "chat.completion",
        "created": 7,
        "model": "served",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
            }
        ],
        "usage": usage(20, 5, 16),
        **more,
    }


def in_turn(*scripts: Script) -> Script:
    """The first request gets the first, wherever it goes, and so on; later ones get the last."""
    left = list(scripts)

    async def script(received: Received) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(received)

    return script


def answers(status: int, body: object, **headers: str) -> Script:
    async def script(received: Received) -> None:
        await received.answer(status, body, **headers)

    return script


@dataclass
class Upstream:
    """A server. `scripts` answer the generating requests in order, the last all later ones."""

    scripts: Sequence[Script] = field(default_factory=lambda: [streams()])
    models: Sequence[str] = ("served",)
    models_status: int = 200
    metrics: str | None = None
    silent: bool = False
    received: list[Received] = field(default_factory=list)
    probes: list[Received] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Upstream]:
        tasks: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            try:
                await self._connection(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            finally:
                tasks.discard(task)
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in tuple(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        fresh = True
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.split("\r\n")
            method, path, _ = first.split(" ")
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines if line)
            }
            raw = await reader.readexactly(int(headers.get("content-length", "0")))
            received = Received(method, path, headers, raw, writer, reader, fresh)
            fresh = False
            if self.silent:
                await received.gone()
                return
            if method == "GET":
                self.probes.append(received)
                await self._probe(received)
                continue
            script = self.scripts[min(len(self.received), len(self.scripts) - 1)]
            self.received.append(received)
            await script(received)
            if writer.is_closing():
                return

    async def _probe(self, received: Received) -> None:
        if received.path == "/v1/models":
            data = [{"id": name} for name in self.models]
            await received.answer(self.models_status, {"object": "list", "data": data})
        elif received.path == "/metrics" and self.metrics is not None:
            await received.answer(200, self.metrics.encode(), "text/plain")
        else:
            await received.answer(404, {})
