"""HTTP/1.1 from the client's side, at little cost to the machine that is being measured.

Client, gateway and engine share the same cores. So a connection wakes its task once for each
answer, not for each chunk, and only notes when which bytes came; reading them can wait until the
measurement is over, or is done as they come by whoever takes them (`Take`), from a `Backlog` if
there are so many connections that reading one would delay the time stamps of the next.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import httptools

from loadtest.wire.backlog import Backlog

Take = Callable[[float, bytes], None]
"""Takes a piece of a body and when it came on the clock of `time.perf_counter`. Must not raise."""

_Result = TypeVar("_Result")
_INTERIM = range(100, 200)
_OK = 200
_OUT_OF_SOCKETS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)


class ExchangeError(Exception):
    """No usable answer came. The text is one line that says why."""


class UnreachableError(ExchangeError):
    """No connection could be made."""


class OutOfSocketsError(UnreachableError):
    """This process or machine has no file descriptor or port left: no fault of the server's."""


class NotInTimeError(ExchangeError):
    """The answer had not ended when its time was over."""


class Arrival(NamedTuple):
    """A piece of a body, and when it came on the clock of `time.perf_counter`."""

    at_s: float
    data: bytes


@dataclass(slots=True)
class Answer:
    """One response as it came over the wire. Header names are lower-case. What was given to a
    `Take` is not among the arrivals.

    `whole` is False if the connection closed before the end that the headers announced.
    """

    status: int
    headers: dict[str, str]
    arrivals: list[Arrival]
    sent_at_s: float
    ended_at_s: float
    whole: bool

    @property
    def body(self) -> bytes:
        """Every piece joined."""
        return b"".join(piece.data for piece in self.arrivals)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an OpenAI-compatible API is, and the key that opens it."""

    host: str
    port: int
    base_path: str
    tls: bool = False
    key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, key: str | None = None) -> Endpoint:
        """From "http://127.0.0.1:8000/v1". Raises ValueError with one line for any other shape, and
        for a key that no header can hold; neither a password nor the key is in it."""
        try:
            parts = urlsplit(url)
            port, named = parts.port, parts.username is not None
        except ValueError:
            raise ValueError(f"{url.rpartition('@')[2]}: not a URL") from None
        # What is not sent is not taken: who gives it means something by it.
        if named or parts.query or parts.fragment:
            raise ValueError("a URL here has no user, password, query or fragment")
        host = parts.hostname
        if parts.scheme not in ("http", "https") or not host or not _can_be_asked(host, parts.path):
            raise ValueError(f"{url}: must look like http://127.0.0.1:8000/v1")
        tls = parts.scheme == "https"
        return cls(
            host, port or (443 if tls else 80), parts.path.rstrip("/"), tls, checked_key(key)
        )

    @property
    def authority(self) -> str:
        """Host and port as a URL has them: an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """What it was parsed from."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.base_path}"

    def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The bytes of one request; `path` is absolute and does not get the base path. `headers`
        are more of them."""
        lines = [f"{method} {path} HTTP/1.1", f"host: {self.authority}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if self.key is not None:
            lines.append(f"authorization: Bearer {self.key}")
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body


def checked_key(key: str | None) -> str | None:
    """The key. Raises ValueError if no header can hold it, as with a line break at its end."""
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ValueError("the API key has spaces around it or characters that no header can hold")
    return key


class Connection:
    """A keep-alive connection that is opened again whenever the server has closed it."""

    def __init__(self, endpoint: Endpoint, backlog: Backlog | None = None) -> None:
        """What comes is read at once, or from `backlog`, which many connections share."""
        self._endpoint = endpoint
        self._backlog = backlog
        self._wire: _Wire | None = None

    async def open(self, timeout_s: float) -> None:
        """Connect now, unless that is done, so that the next exchange need not. Raises
        ExchangeError."""
        await self._within(timeout_s, self._opened, "no connection")

    async def exchange(self, request: bytes, timeout_s: float, take: Take | None = None) -> Answer:
        """Send one request and collect its answer. Raises ExchangeError. The pieces of a 200's
        body go to `take` instead of the answer's arrivals, if there is one.

        The answer's clock starts when the request is handed to an open connection, so that it
        measures the server and not the handshake.
        """
        return await self._within(
            timeout_s, lambda: self._exchange(request, take), "no end of the answer"
        )

    async def _within(
        self, timeout_s: float, act: Callable[[], Awaitable[_Result]], lacking: str
    ) -> _Result:
        """The result, or a closed connection."""
        try:
            async with asyncio.timeout(timeout_s):
                return await act()
        except TimeoutError:
            self.close()
            raise NotInTimeError(f"{lacking} within {timeout_s:g} s") from None
        except BaseException:
            self.close()
            raise

    async def _exchange(self, request: bytes, take: Take | None) -> Answer:
        reused = self._wire is not None and self._wire.usable
        try:
            return await (await self._opened()).exchange(request, take)
        except _ClosedUnansweredError:
            # A server may close an idle connection just as the next request is on its way.
            if not reused:
                raise
        return await (await self._opened()).exchange(request, take)

    async def _opened(self) -> _Wire:
        if self._wire is not None and self._wire.usable:
            return self._wire
        self.close()
        loop, at = asyncio.get_running_loop(), self._endpoint
        context = _tls_context() if at.tls else None
        try:
            _, self._wire = await loop.create_connection(
                lambda: _Wire(self._backlog), at.host, at.port, ssl=context
            )
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
            kind = OutOfSocketsError if error.errno in _OUT_OF_SOCKETS else UnreachableError
            raise kind(f"{at.authority}: cannot connect ({why})") from None
        return self._wire

    def close(self) -> None:
        """Close what is open. The next exchange opens a new connection."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None


@asynccontextmanager
async def connect(endpoint: Endpoint) -> AsyncIterator[Connection]:
    """A connection that is closed with the scope."""
    connection = Connection(endpoint)
    try:
        yield connection
    finally:
        connection.close()


async def fetch(endpoint: Endpoint, method: str, path: str, timeout_s: float = 10.0) -> Answer:
    """One request without a body over a connection of its own. Raises ExchangeError."""
    async with connect(endpoint) as connection:
        return await connection.exchange(endpoint.request(method, path), timeout_s)


def _can_be_asked(host: str, path: str) -> bool:
    """Whether the host can be looked up, and the path fits a request's first line."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return path.isascii() and path.isprintable() and " " not in path


@cache
def _tls_context() -> ssl.SSLContext:
    """One for all connections: reading the system's certificates takes tens of milliseconds, for
    which nothing else would be sent or read."""
    return ssl.create_default_context()


class _ClosedUnansweredError(ExchangeError):
    """The connection closed before the first byte of the answer."""


class _Wire(asyncio.Protocol):
    """One TCP connection with one request at a time; the parser calls the `on_*` methods."""

    def __init__(self, backlog: Backlog | None) -> None:
        self._backlog = backlog
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[Answer] | None = None
        self._now_s = 0.0
        self._sent_at_s = 0.0
        self._keep_alive = True
        self._given_up = False
        self._lost_by: Exception | None = None
        self._headers: dict[str, str] = {}
        self._arrivals: list[Arrival] = []
        self._take: Take | None = None
        self._to_take: Take | None = None

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        return self._keep_alive and self._transport is not None

    def exchange(self, request: bytes, take: Take | None) -> asyncio.Future[Answer]:
        """Send, and promise the answer. Only for a usable wire without a request in flight."""
        if self._transport is None:
            raise _ClosedUnansweredError("the connection is closed")
        self._headers, self._arrivals = {}, []
        self._take = take
        self._done = asyncio.get_running_loop().create_future()
        self._sent_at_s = time.perf_counter()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        self._given_up = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # What uvloop passes here is a Transport in all but ancestry.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        at_s = time.perf_counter()
        if self._backlog is None:
            self._read(at_s, data)
        else:
            self._backlog.put(self._read, at_s, data)

    def connection_lost(self, exc: Exception | None) -> None:
        at_s = time.perf_counter()
        self._transport, self._lost_by = None, exc
        if self._backlog is None:
            self._read_end(at_s, b"")
        else:
            self._backlog.put(self._read_end, at_s, b"")

    def _read(self, at_s: float, data: bytes) -> None:
        if self._given_up:
            return
        self._now_s = at_s
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ExchangeError(f"not HTTP/1.1: {error}"))
            self.close()

    def _read_end(self, at_s: float, _: bytes) -> None:
        """The connection has closed; all that came before has been read."""
        self._now_s = at_s
        if self._done is None or self._done.done():
            return
        if not self._headers:
            why = "the connection closed without an answer"
            cause = self._lost_by
            self._fail(_ClosedUnansweredError(why if cause is None else f"{why} ({cause})"))
            return
        # Without a length and without chunks, the end of the connection is the end of the body.
        delimited = "content-length" in self._headers or "transfer-encoding" in self._headers
        self._finish(whole=not delimited and self._lost_by is None)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._to_take = self._take if self._parser.get_status_code() == _OK else None

    def on_body(self, data: bytes) -> None:
        if self._to_take is not None:
            self._to_take(self._now_s, data)
        else:
            self._arrivals.append(Arrival(self._now_s, data))

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() in _INTERIM:
            self._headers = {}  # Such as 103: the answer is still to come.
            return
        self._keep_alive = self._parser.should_keep_alive()
        self._finish(whole=True)

    def _finish(self, *, whole: bool) -> None:
        if self._done is None or self._done.done():
            return
        status = self._parser.get_status_code()
        self._done.set_result(
            Answer(status, self._headers, self._arrivals, self._sent_at_s, self._now_s, whole)
        )

    def _fail(self, error: ExchangeError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
