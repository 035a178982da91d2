"""One connection to a server: requests go out on it one after another, answers come back as bytes.

HTTP/1.1, RFC 9112. What is bounded here: a field of an answer's head (8 KiB, 128 of them), what may
come without anything coming of it (64 KiB: a whole head, trailers, a chunk's extensions), and what
waits to be read (the connection is not read from beyond 256 KiB).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import cast

import httptools

from gateway.remote.failures import LossKind

_MAX_FIELD_BYTES = 8190
_MAX_FIELDS = 128
_MAX_FRUITLESS_BYTES = 64 << 10
_MAX_WAITING_BYTES = 256 << 10
_WHOLE_WRITE_BYTES = 64 << 10
"""Up to here joining a head and a body costs less than a second buffer on its way to the socket."""


class WireLost(Exception):
    """The answer will not come to its end. `unanswered`: not a byte of it has come."""

    def __init__(self, kind: LossKind, detail: str, *, unanswered: bool) -> None:
        super().__init__(detail)
        self.kind = kind
        self.unanswered = unanswered


class Wire(asyncio.Protocol):
    """Belongs to the event loop, and to one exchange at a time, which `ask`s, waits for the `head`
    and `read`s.

    The parser calls the `on_*` methods; what they raise makes it give up.
    """

    def __init__(self, on_lost: Callable[[Wire], None]) -> None:
        """`on_lost` is called once, when the connection is no more."""
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self.on_body: Callable[[bytes], None] = self._pieces.append
        """For the parser: most of what it calls is this."""
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(
            lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        self._waiter: asyncio.Future[None] | None = None
        self._failure: LossKind | None = None
        self._aborted = False
        self._why = ""
        self._heard = False
        self._paused = False
        self._fields = 0
        self._fruitless_bytes = 0
        self._keep_alive = True
        self.headers: dict[bytes, bytes] = {}
        """The answer's, by lower-case names; of several the first."""
        self.status = 0
        """The answer's; 0 until its head has come."""
        self.complete = True
        """Whether all of the answer has come. It may not all have been read."""
        self.used = False
        """Whether anything was asked here before the request that is under way."""
        self.idle_since_s = self.heard_s = monotonic()
        """`heard_s` is when the last bytes of the answer came, read or not."""

    @property
    def is_open(self) -> bool:
        """Whether there is a connection at all."""
        return self._transport is not None

    @property
    def may_be_used(self) -> bool:
        """Whether another request may be sent: all of the last answer has come, all of its request
        has gone, nobody waits for more of it, who would get what is the next one's, and the server
        has not said that it closes."""
        transport = self._transport
        return (
            self.complete
            and self._keep_alive
            and self._waiter is None
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    def ask(self, head: bytes, body: bytes) -> None:
        """Send a request. Only where one may be sent."""
        self.headers = {}
        self.status = 0
        self.complete = self._heard = False
        self._fields = self._fruitless_bytes = 0
        self._pieces.clear()
        transport = self._transport
        if transport is None:
            self._fail(LossKind.RESET, "the connection is closed")
        elif len(body) <= _WHOLE_WRITE_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)

    async def head(self) -> None:
        """Wait for the answer's status and headers. Raises WireLost."""
        while not self.status:
            if self._failure is not None:
                raise self._lost(self._failure)
            await self._more()

    async def read(self) -> bytes:
        """What has come of the body since the last read, at least a byte; nothing at its end.
        Raises WireLost."""
        pieces = self._pieces
        while not pieces:
            if self.complete:
                return b""
            if self._failure is not None:
                raise self._lost(self._failure)
            if self._paused and self._transport is not None:
                self._paused = False
                self._transport.resume_reading()
            await self._more()
        whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return whole

    def rest(self) -> None:
        """The exchange is over; the next may begin."""
        self._pieces.clear()
        self.used = True
        self.idle_since_s = monotonic()

    def abort(self) -> None:
        """Close at once. Idempotent."""
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but ancestry

    def data_received(self, data: bytes) -> None:
        if self.complete:
            self._keep_alive = False  # nobody has asked
            self.abort()
            return
        self._heard = True
        self.heard_s = monotonic()
        pieces = self._pieces
        before = len(pieces)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keep_alive = False
            # where the whole answer came before that, it is read all the same
            self._fail(LossKind.GARBAGE, type(error).__name__)
            self.abort()
            return
        if len(pieces) > before:
            self._fruitless_bytes = 0
            if not self.complete and sum(map(len, pieces)) > _MAX_WAITING_BYTES:
                self._pause()
        elif not self.complete:
            self._fruitless_bytes += len(data)
            if self._fruitless_bytes > _MAX_FRUITLESS_BYTES:
                self._fail(LossKind.GARBAGE, "too large a head")
                self.abort()
                return
        if pieces or self.complete or self.status:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.complete:
            if exc is None and self._ends_with_connection:
                self.complete = True
                self._wake()
            elif exc is None and self.status:
                self._fail(LossKind.ENDED_EARLY, "the connection was closed")
            else:
                self._fail(LossKind.RESET, "closed" if exc is None else type(exc).__name__)
        self._on_lost(self)

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("a second answer to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > _MAX_FIELDS or len(name) + len(value) > _MAX_FIELD_BYTES:
            raise ValueError("too large a head")
        if not self.status:  # else it is a trailer
            self.headers.setdefault(name.lower(), value)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
        else:
            self.headers = {}  # of an interim answer; the one that counts comes after it

    def on_message_complete(self) -> None:
        if self.status:
            self.complete = True
            self._keep_alive = self._keep_alive and self._parser.should_keep_alive()

    @property
    def _ends_with_connection(self) -> bool:
        """Whether the answer under way is one that is whole when the server closes."""
        return (
            bool(self.status)
            and not self._aborted
            and b"content-length" not in self.headers
            and b"transfer-encoding" not in self.headers
        )

    async def _more(self) -> None:
        """Wait until something has come, or nothing will."""
        self._waiter = waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _fail(self, kind: LossKind, why: str) -> None:
        if self._failure is None:
            self._failure, self._why = kind, why
        self._wake()

    def _lost(self, kind: LossKind) -> WireLost:
        return WireLost(kind, self._why, unanswered=not self._heard)
