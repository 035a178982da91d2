"""Connections to Redis for large values: few wake-ups, few copies, and an end that is an end."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import Any

import hiredis  # noqa: F401  # without it redis-py takes a parser of its own, which reads otherwise
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection

READ_BYTES = 256 << 10
"""Most that one read takes from the socket: more than uvloop's 64 KiB, as each read is a turn of
the loop, and little enough that it is still in the processor's cache when it is parsed."""


class Progress:
    """When anything last arrived over any connection of a link, on the loop's clock."""

    def __init__(self) -> None:
        self.last_s = 0.0


class ChunkStream(asyncio.StreamReader):
    """A StreamReader that hands on what arrives as it came, without a buffer of its own.

    `read` returns one chunk whatever its size; only hiredis reads from it, which takes any.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._loop_time = asyncio.get_running_loop().time
        self._chunks: deque[bytes] = deque()
        self._news = asyncio.Event()

    def feed_data(self, data: Any) -> None:
        self._chunks.append(data)
        self._progress.last_s = self._loop_time()
        self._news.set()

    def feed_eof(self) -> None:
        super().feed_eof()
        self._news.set()

    def set_exception(self, exc: BaseException) -> None:
        super().set_exception(exc)  # type: ignore[arg-type]  # typeshed: Exception only
        self._news.set()

    def at_eof(self) -> bool:
        return not self._chunks and super().at_eof()

    async def read(self, n: int = -1) -> bytes:  # noqa: ARG002  # a chunk is what it is
        while not self._chunks:
            problem = self.exception()
            if problem is not None:
                raise problem
            if super().at_eof():
                return b""
            self._news.clear()
            await self._news.wait()
        return self._chunks.popleft()


class LargeReads(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """Reads from the socket into one buffer of `READ_BYTES`, however little the loop suggests."""

    def __init__(self, stream: ChunkStream) -> None:
        super().__init__(stream)
        self._stream = stream
        self._space = memoryview(bytearray(READ_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # the loop's suggestion
        return self._space

    def buffer_updated(self, nbytes: int) -> None:
        self._stream.feed_data(bytes(self._space[:nbytes]))


class _Abrupt:
    """Disconnecting drops what has not been sent. A graceful close would go on sending from a slot
    that its owner has taken back, whenever a frozen server wakes up."""

    _writer: asyncio.StreamWriter | None

    def __init__(self, *, progress: Progress, **kwargs: Any) -> None:
        self._progress = progress
        super().__init__(**kwargs)

    async def disconnect(self, *args: Any, **kwargs: Any) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        await super().disconnect(*args, **kwargs)  # type: ignore[misc]  # the connection's


class TcpConnection(_Abrupt, Connection):
    """redis-py's TCP connection over `LargeReads`."""

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        stream = ChunkStream(self._progress)
        async with asyncio.timeout(self.socket_connect_timeout):
            transport, protocol = await loop.create_connection(
                lambda: LargeReads(stream), **self._connection_arguments()
            )
        self._reader = stream
        self._writer = asyncio.StreamWriter(transport, protocol, stream, loop)


class TlsConnection(TcpConnection, SSLConnection):
    """The same over TLS."""


class UnixConnection(_Abrupt, UnixDomainSocketConnection):
    """The same over a unix socket."""

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        stream = ChunkStream(self._progress)
        async with asyncio.timeout(self.socket_connect_timeout):
            transport, protocol = await loop.create_unix_connection(
                lambda: LargeReads(stream), self.path
            )
        self._reader = stream
        self._writer = asyncio.StreamWriter(transport, protocol, stream, loop)
        await self.on_connect()


class RenewedTlsConnection(SSLConnection):
    """redis-py's TLS connection, of a pool that keeps it however often it fails. The authorities
    are read again once they do not vouch for the server, as they may have been renewed with it."""

    async def _connect(self) -> None:
        try:
            await super()._connect()  # type: ignore[no-untyped-call]  # redis-py's, without types
        except ssl.SSLCertVerificationError:
            self.ssl_context.context = None
            raise
