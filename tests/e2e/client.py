"""Requests as a client sends them, and streams as it reads them."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

ACME_KEY = "sk-acme-5fK2mQ8vX1pZ7rT4"
AC_KEY = "sk-ac-9dW3nB6yH0sL2cJ8"
ORIGIN = "https://chat.example.com"
"""Of a browser's page that may call: its answers pass the CORS layer too."""
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass
class Streamed:
    """A stream read to its end: every event's JSON, and whether `[DONE]` closed it."""

    status: int
    headers: httpx.Headers
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        """The chunks of one choice."""
        return [
            choice
            for event in self.events
            for choice in event.get("choices", ())
            if choice["index"] == index
        ]

    def text(self, index: int = 0) -> str:
        """The deltas of one choice, joined."""
        return "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content", "")
            for choice in self.choices(index)
        )

    def finish_reasons(self, index: int = 0) -> list[str]:
        """Those that are not null."""
        reasons = [choice["finish_reason"] for choice in self.choices(index)]
        return [reason for reason in reasons if reason is not None]


@dataclass
class Client:
    """One tenant's way in."""

    http: httpx.Client
    key: str

    @property
    def headers(self) -> dict[str, str]:
        """What authenticates it, from a page that may call."""
        return {"Authorization": f"Bearer {self.key}", "Origin": ORIGIN}

    def post(self, path: str, body: object) -> httpx.Response:
        """Send JSON; any status."""
        return self.http.post(path, json=body, headers=self.headers)

    def whole(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON of an answer that must be a 200."""
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        return whole

    def stream(self, path: str, body: dict[str, Any]) -> Streamed:
        """Read a stream to its end; a refusal has no events."""
        body = body | {"stream": True}
        with self.http.stream("POST", path, json=body, headers=self.headers) as answer:
            streamed = Streamed(answer.status_code, answer.headers)
            if answer.status_code != 200:
                answer.read()
                streamed.events.append(answer.json())
                return streamed
            read_events(answer.iter_lines(), streamed)
        return streamed


def read_events(lines: Iterator[str], streamed: Streamed) -> None:
    """Append a stream's events; asserts that nothing follows `[DONE]`."""
    for line in lines:
        if not line or line.startswith(":"):
            continue
        assert line.startswith("data: ")
        assert not streamed.done
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            streamed.done = True
        else:
            streamed.events.append(json.loads(data))


def chat(content: str, model: str = "m", **fields: object) -> dict[str, Any]:
    """A chat body with one user message, greedy unless told otherwise."""
    body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}
    return body | fields


def completion(prompt: object, model: str = "m", **fields: object) -> dict[str, Any]:
    """A completions body, greedy unless told otherwise."""
    return {"model": model, "prompt": prompt, "temperature": 0} | fields


@contextmanager
def sent(port: int, key: str, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A socket on which the request has been sent whole and nothing has been read."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: forebay\r\nAuthorization: Bearer {key}\r\n"
        f"Origin: {ORIGIN}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(head.encode() + payload)
        yield connection


def reset(connection: socket.socket) -> None:
    """Close with a TCP reset instead of a goodbye."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
