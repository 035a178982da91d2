"""uvicorn's HTTP protocol with the bounds it lacks: size of the head, time to send it, and errors
in the API's envelope when a request is too broken to reach the application."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.client_link import LINK, ClientLink
from gateway.errors import ApiError

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 200
HEAD_TIMEOUT_S = 30.0

_TOO_LARGE = ApiError(431, "The request's headers are too large.", code="headers_too_large")
_HEAD_TOO_LARGE = "request head too large"
"""Raised to the parser, which turns it into an error of its own."""
_INVALID = ApiError(400, "This is not a valid HTTP request.", code="invalid_http")
_STATUS_LINES = {
    400: b"HTTP/1.1 400 Bad Request\r\n",
    431: b"HTTP/1.1 431 Request Header Fields Too Large\r\n",
}


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection.

    A head larger than MAX_HEAD_BYTES or of more than MAX_HEADERS fields gets a 431; one that is
    not complete HEAD_TIMEOUT_S after its first byte is cut off. A connection that sends nothing is
    closed after the keep-alive time.
    """

    _head_bytes = 0
    _reading_head = False
    _timer: asyncio.TimerHandle | None = None
    _link: ClientLink
    _refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)  # uvloop's is one in all but ancestry
        super().connection_made(stream)
        self.transport = cast(asyncio.Transport, _HeadWithBody(stream, self.loop))
        self._link = ClientLink(self.flow.resume_reading)
        self._restart_timer(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._link.lost()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._reading_head and self._timer is None:
            # most heads come in one piece, and a timer for each would cost more than reading it
            self._restart_timer(HEAD_TIMEOUT_S)
        # The parser keeps an unfinished header to itself, so that its callbacks cannot count it.
        if self._reading_head and not self._refused:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._reading_head = True
        self._stop_timer()
        super().on_message_begin()
        self._link.request_is_whole = False
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]  # a typed dict, open to more
        scope[LINK] = self._link

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError(_HEAD_TOO_LARGE)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            raise ValueError(_HEAD_TOO_LARGE)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reading_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._link.request_is_whole = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's signature
        """Called when the parser gives up, also because a callback of ours raised."""
        self._refuse(_TOO_LARGE if self._head_is_too_large() else _INVALID)

    def _refuse(self, error: ApiError) -> None:
        self._refused = True
        # An answer may be on its way to an earlier request of this connection; do not cut into it.
        if self.cycle is None or self.cycle.response_complete:
            body = orjson.dumps(error.envelope())
            self.transport.write(
                _STATUS_LINES[error.status]
                + b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
                + b"connection: close\r\n\r\n"
                + body
            )
        self.transport.close()

    def _head_is_too_large(self) -> bool:
        return self._head_bytes > MAX_HEAD_BYTES or len(self.headers or ()) > MAX_HEADERS

    def _restart_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _HeadWithBody:
    """A transport that sends an answer's head together with what of its body is written in the same
    turn of the loop: uvicorn writes them one by one, and each write is a system call, among the
    dearest things that a short answer needs."""

    __slots__ = ("_held", "_loop", "_transport", "_write", "is_closing")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._write = transport.write
        self.is_closing = transport.is_closing  # asked for with each write
        self._loop = loop
        self._held = b""

    def write(self, data: bytes) -> None:
        """What is no head goes out at once, behind the head that was held."""
        if self._held:
            data, self._held = self._held + data, b""
        elif data.startswith(b"HTTP/1.1 "):
            self._held = data
            self._loop.call_soon(self._flush)
            return
        self._write(data)

    def close(self) -> None:
        """Close once everything has been sent."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            data, self._held = self._held, b""
            self._write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
