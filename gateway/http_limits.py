"""uvicorn's HTTP protocol with the bounds it lacks: size of the head, time to send it, and errors
in the API's envelope when a request is too broken to reach the application."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.client_link import LINK, ClientLink
from gateway.errors import ApiError
from gateway.http_until_close import until_close
from gateway.http_upgrade import head_of_body

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 200
HEAD_TIMEOUT_S = 30.0
_READ_AHEAD = 8
"""So many requests are read while another is answered, to see whether its client is still there."""

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

    A head larger than MAX_HEAD_BYTES or of more than MAX_HEADERS fields gets a 431, and so do a
    body's trailers; a head that is not complete HEAD_TIMEOUT_S after its first byte is cut off. A
    connection on which no request begins is closed after the keep-alive time, whatever else comes.
    What is no HTTP gets its 400 behind the answers to the requests before it. Offers of another
    protocol are passed over.
    """

    url = b""
    _head_bytes = 0
    _line_bytes = 0
    _fruitless_bytes = 0
    _heads_begun = 0
    _body_goes_on = False
    _in_message = False
    _reading_head = False
    _seen_already = False
    _timer: asyncio.TimerHandle | None = None
    _link: ClientLink
    _refusal: ApiError | None = None

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
        if self._refusal is not None:
            return
        was_in_message, self._heads_begun = self._in_message, 0
        self._body_goes_on = False
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self._refuse(_TOO_LARGE if self._head_is_too_large() else _INVALID)
            return
        if not self._reading_head:
            self._count_fruitless(len(data))
            return
        if self._timer is None:
            # most heads come in one piece, and a timer for each would cost more than reading it
            self._restart_timer(HEAD_TIMEOUT_S)
        # The parser keeps an unfinished header to itself, so that its callbacks cannot count it.
        if self._heads_begun + was_in_message > 1:
            self._line_bytes = 0  # nobody knows where in these bytes this request began
        else:
            behind = len(data) - (data.rfind(b"\n") + 1)
            self._line_bytes = behind if behind < len(data) else self._line_bytes + behind
        if self._head_bytes + self._line_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)

    def _count_fruitless(self, size: int) -> None:
        """What brings a body no further, trailers and chunks' extensions: of an unfinished trailer
        the parser would keep any length, and copy all of it with each piece."""
        if self._body_goes_on or not self._in_message:
            self._fruitless_bytes = 0
            return
        self._fruitless_bytes += size
        if self._fruitless_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)

    def _parse(self, data: bytes) -> None:
        """Feed all of it to the parser, which stops at each offer of another protocol. Raises
        HttpParserError."""
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
                self._read_on_behind_offer()

    def _read_on_behind_offer(self) -> None:
        """The parser has taken the head for all of the request. One that has seen a head without
        the offer reads on, if there is a body to read."""
        if not self._in_message:
            return
        head = head_of_body(self.headers)
        assert head is not None
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's has
        self._seen_already = True
        self.parser.feed_data(head)
        self._seen_already = False

    def on_message_begin(self) -> None:
        if self._seen_already:
            return
        self._unset_keepalive_if_required()
        self._head_bytes = self._line_bytes = 0
        self._heads_begun += 1
        self._in_message = self._reading_head = True
        self._stop_timer()
        super().on_message_begin()
        self._link.request_is_whole = False
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]  # a typed dict, open to more
        scope[LINK] = self._link

    def on_url(self, url: bytes) -> None:
        if self._seen_already:
            return
        super().on_url(url)
        if len(self.url) > MAX_HEAD_BYTES:
            raise ValueError(_HEAD_TOO_LARGE)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._seen_already:
            return
        if not self.headers:
            self._head_bytes = len(self.url)  # which is whole only now
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            raise ValueError(_HEAD_TOO_LARGE)
        if self._reading_head:  # else it is a trailer, which must not be taken for a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._seen_already:
            return
        # armed by an answer that was complete before this head was
        self._unset_keepalive_if_required()
        self._body_goes_on = True
        self._stop_timer()
        if self.parser.get_http_version() < "1.1":
            self.expect_100_continue = False  # its clients do not know it (RFC 9110, 10.1.1)
            super().on_headers_complete()
            # the cycle's task, which asks for it, has not begun
            self.cycle.send = until_close(self.cycle)  # type: ignore[assignment,method-assign]
        else:
            super().on_headers_complete()
        self._reading_head = False  # from here on it is a request, which is answered
        if 0 < len(self.pipeline) <= _READ_AHEAD:
            # uvicorn has stopped reading, and with it seeing the client leave
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._body_goes_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and head_of_body(self.headers) is not None:
            return  # its body is still to come
        self._in_message = False
        self._link.request_is_whole = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and self._refusal is not None and not self.transport.is_closing():
            self._send_refusal(self._refusal)

    def _refuse(self, error: ApiError) -> None:
        """Take nothing more of this connection, and say so once all answers before it are out."""
        self._refusal = error
        self._stop_timer()
        newest = self.cycle
        if newest is None or newest.response_complete:
            if self._in_message and not self._reading_head:
                self.transport.close()  # it is the rest of a request that has its answer
            else:
                self._send_refusal(error)
        elif not newest.more_body:
            return  # `newest` is whole, and what comes behind it is not
        elif self.pipeline:
            self.pipeline.popleft()  # `newest` itself, which nobody has begun to answer
        elif newest.response_started:
            self.transport.close()
        else:
            newest.disconnected = True  # its answer is given here
            newest.message_event.set()
            self._send_refusal(error)

    def _send_refusal(self, error: ApiError) -> None:
        body = orjson.dumps(error.envelope())
        self.transport.write(
            _STATUS_LINES[error.status]
            + b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
            + b"connection: close\r\n\r\n"
            + body
        )
        self.transport.close()

    def _head_is_too_large(self) -> bool:
        return (
            self._head_bytes > MAX_HEAD_BYTES
            or len(self.url) > MAX_HEAD_BYTES
            or len(self.headers or ()) > MAX_HEADERS
        )

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
