"""One request to a remote server and its answer, over a pool of connections.

What is bounded here: the answer's headers (8 KiB each, 128 of them), the time to its first byte and
between two reads, and through `read_all` its size. What is read may be cut anywhere.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from time import monotonic
from types import TracebackType
from typing import NamedTuple

import aiohttp
from yarl import URL

from gateway.remote.failures import LossKind, UpstreamLost, answer_too_long

_CONNECT_S = 5.0
_IDLE_S = 4.0
"""How long a connection is kept for the next request: less than the 5 s after which uvicorn, and
with it vLLM and SGLang, closes it."""
_RACE_S = 1.0
"""A connection that is lost so soon, before any byte of an answer, was being closed already."""
_LOOK_S = 5.0
"""How often it is looked for silence at least: changes of patience beyond that need no timer."""
_DRAIN_S = 0.25
_DRAIN_READS = 4
_LARGE_BODY_BYTES = 1 << 20
_NO_TIMEOUTS = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)


class Patience(NamedTuple):
    """How many seconds to wait for the head of an answer, and for each read after that."""

    first_byte_s: float
    between_s: float


class Connections:
    """The connections to one server. An async scope; what is open when it ends is cut off."""

    def __init__(self, base_url: str, headers: Mapping[str, str], max_running: int) -> None:
        self._base_url = base_url
        self._headers = dict(headers)
        self._limit = 2 * max_running
        self._urls: dict[str, URL] = {}
        self._open: set[Exchange] = set()
        self._drains: set[asyncio.Task[None]] = set()
        self.last_heard_s = float("-inf")
        """When the last byte of any answer came."""

    async def __aenter__(self) -> Connections:
        self._pooled = self._session(
            aiohttp.TCPConnector(limit=self._limit, keepalive_timeout=_IDLE_S)
        )
        # for what a kept connection has just failed: another kept one may be as dead
        self._fresh = self._session(aiohttp.TCPConnector(limit=self._limit, force_close=True))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cut_silent(float("inf"), LossKind.RESET)
        if self._drains:
            await asyncio.wait(tuple(self._drains))
        await self._pooled.close()
        await self._fresh.close()

    @property
    def open_exchanges(self) -> int:
        """How many there are now."""
        return len(self._open)

    def exchange(
        self, path: str, body: bytes, headers: Mapping[str, str], patience: Patience
    ) -> Exchange:
        """POST a body; opening the result sends it."""
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self._base_url + path, encoded=True)
        return Exchange(self, url, body, {**self._headers, **headers}, patience)

    def drain(self, exchange: Exchange) -> None:
        """Let an exchange come to its end, and close it."""
        task = asyncio.create_task(exchange.drain())
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    def cut_silent(self, since_s: float, kind: LossKind) -> None:
        """End every exchange that has heard nothing since then."""
        for exchange in tuple(self._open):
            if exchange.last_heard_s < since_s:
                exchange.cut(kind)

    async def post(
        self, url: URL, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """The answer as soon as its head is there. Raises aiohttp's errors.

        A connection that the server was closing when it was used is no fault of anybody's: the
        request, which no byte has answered, is sent once more on a new one.
        """
        sent_s = monotonic()
        try:
            return await self._pooled.post(
                url, data=_payload(body), headers=headers, allow_redirects=False
            )
        except (aiohttp.ServerDisconnectedError, ConnectionError, aiohttp.ClientOSError) as error:
            never_connected = isinstance(error, aiohttp.ClientConnectorError)
            if never_connected or monotonic() - sent_s > _RACE_S:
                raise
        return await self._fresh.post(
            url, data=_payload(body), headers=headers, allow_redirects=False
        )

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=_NO_TIMEOUTS,
            trust_env=False,
            auto_decompress=False,
            skip_auto_headers=("user-agent",),
        )


class Exchange:
    """Its scope, or `open` and `close`, begins when the head of the answer has come and ends the
    answer, whole or not: a server that is still sending is disconnected from.

    Everything but what the caller does raises UpstreamLost, unless it says otherwise.
    """

    __slots__ = (
        "_body",
        "_connections",
        "_cut_by",
        "_head_limit",
        "_headers",
        "_patience",
        "_response",
        "_url",
        "_waiting",
        "_watch",
        "last_heard_s",
        "sent_s",
    )

    def __init__(
        self,
        connections: Connections,
        url: URL,
        body: bytes,
        headers: Mapping[str, str],
        patience: Patience,
    ) -> None:
        self._connections = connections
        self._url = url
        self._body = body
        self._headers = headers
        self._patience = patience
        self._response: aiohttp.ClientResponse | None = None
        self._head_limit: asyncio.Timeout | None = None
        self._cut_by: LossKind | None = None
        self._waiting = False
        self._watch: asyncio.TimerHandle | None = None
        self.sent_s = self.last_heard_s = monotonic()

    async def __aenter__(self) -> Exchange:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def open(self) -> None:
        """Send the request and wait for the head of its answer; `close` it later on every path."""
        self.sent_s = self.last_heard_s = monotonic()
        self._connections._open.add(self)
        try:
            async with asyncio.timeout(self._patience.first_byte_s) as self._head_limit:
                self._response = await self._connections.post(self._url, self._body, self._headers)
        except TimeoutError:
            raise UpstreamLost(self._cut_by or LossKind.STALLED, "no answer") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._lost(error) from error
        finally:
            self._head_limit = None
            self._body = b""
            if self._response is None:
                self.close()
        self._note_heard()
        encoding = self._response.headers.get("content-encoding")
        if encoding is not None and encoding.lower() != "identity":
            self.close()
            raise UpstreamLost(LossKind.GARBAGE, "an encoding that was not asked for")

    def close(self) -> None:
        """End the answer, whole or not. Idempotent."""
        self._connections._open.discard(self)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._response is not None:
            self._response.close()  # of an answer that was read to its end, the connection is kept

    @property
    def status(self) -> int:
        """The answer's status."""
        return self._answer.status

    def header(self, name: str) -> str | None:
        """One of the answer's headers."""
        return self._answer.headers.get(name)

    async def read(self) -> bytes:
        """What has come since the last read, at least a byte; nothing at the end."""
        content = self._answer.content
        self._waiting = True
        self.last_heard_s = monotonic()  # a pause between two reads is not the server's
        if self._watch is None:
            self._watch_from_now(self._patience.between_s)
        try:
            piece = await content.readany()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._lost(error) from error
        finally:
            self._waiting = False
        self._note_heard()
        return piece

    async def read_all(self, limit_bytes: int) -> bytes:
        """The rest of the answer. One that is longer raises a 502 ApiError."""
        whole = bytearray()
        while piece := await self.read():
            whole += piece
            if len(whole) > limit_bytes:
                raise answer_too_long()
        return bytes(whole)

    def finish(self) -> None:
        """Close it when all that was wanted has been read. What is left of the answer is read
        behind the caller's back if it is little and comes soon, so that the connection can be used
        again."""
        if self._answer.content.at_eof():
            self.close()
        else:
            self._connections.drain(self)

    async def drain(self) -> None:
        """Read what little is left, then close."""
        try:
            self.be_patient(_DRAIN_S)
            for _ in range(_DRAIN_READS):
                if not await self.read():
                    return
        except UpstreamLost:
            return
        finally:
            self.close()

    def be_patient(self, between_s: float) -> None:
        """Wait so long between two reads from now on."""
        self._patience = Patience(self._patience.first_byte_s, between_s)
        if self._watch is not None and between_s < _LOOK_S:
            self._watch.cancel()
            self._watch = None

    def cut(self, kind: LossKind) -> None:
        """End it from outside: whoever waits for it hears that it was lost, and how."""
        if self._cut_by is not None:
            return
        self._cut_by = kind
        if self._head_limit is not None:
            self._head_limit.reschedule(asyncio.get_running_loop().time())
        elif self._response is not None:
            self._response.close()

    @property
    def _answer(self) -> aiohttp.ClientResponse:
        if self._response is None:
            raise RuntimeError("an exchange has an answer only inside its scope")
        return self._response

    def _watch_from_now(self, delay_s: float) -> None:
        self._watch = asyncio.get_running_loop().call_later(min(delay_s, _LOOK_S), self._look)

    def _look(self) -> None:
        """One timer for many reads: it finds out whether it is too early when it fires."""
        silent_s = monotonic() - self.last_heard_s if self._waiting else 0.0
        if silent_s >= self._patience.between_s:
            self._watch = None
            self.cut(LossKind.STALLED)
        else:
            self._watch_from_now(self._patience.between_s - silent_s)

    def _note_heard(self) -> None:
        self.last_heard_s = self._connections.last_heard_s = monotonic()

    def _lost(self, error: Exception) -> UpstreamLost:
        if self._cut_by is not None:
            return UpstreamLost(self._cut_by)
        return UpstreamLost(_kind_of(error), type(error).__name__)


def _payload(body: bytes) -> bytes | io.BytesIO:
    """A file is written piece by piece, bytes in one go."""
    return body if len(body) <= _LARGE_BODY_BYTES else io.BytesIO(body)


def _kind_of(error: Exception) -> LossKind:
    match error:
        case aiohttp.ClientConnectorError() | aiohttp.ServerTimeoutError():
            return LossKind.REFUSED
        case aiohttp.ClientResponseError() | ValueError():
            return LossKind.GARBAGE
        case aiohttp.ClientPayloadError():
            return LossKind.ENDED_EARLY
        case _:
            return LossKind.RESET
