"""What one server answers to short questions: GET, over a pool of connections of its own, so that
no number of requests under way can keep a question waiting."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple

from gateway.remote.pool import Origin, Pool
from gateway.remote.wire import WireLost

_MOST_AT_ONCE = 2


class Got(NamedTuple):
    """An answer. `body` None: it is longer than was wanted, or in an encoding that nobody asked
    for, a few bytes of which could become any number; `encoding` says in which."""

    status: int
    body: bytes | None
    encoding: str


class Getter:
    """An async scope; what is open when it ends is cut off."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """`url` is any of the server's; `headers` go along with every question, and hold no line
        ends."""
        self._origin = Origin.of(url)
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())

    async def __aenter__(self) -> Getter:
        self._pool = Pool(self._origin, _MOST_AT_ONCE)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._pool.close()

    async def get(self, path: str, limit_bytes: int) -> Got:
        """The answer for a path of the server. Waits as long as whoever asks does. Raises
        UpstreamLost where it cannot be reached, WireLost where the answer breaks off."""
        try:
            return await self._ask(path, limit_bytes, fresh=False)
        except _Stale:
            return await self._ask(path, limit_bytes, fresh=True)

    async def _ask(self, path: str, limit_bytes: int, *, fresh: bool) -> Got:
        """Raises _Stale where a kept connection was closed by the server when it was used."""
        wire = await self._pool.take(fresh=fresh)
        try:
            head = f"GET {path} HTTP/1.1\r\nhost: {self._origin.authority}\r\n{self._fields}\r\n"
            wire.ask(head.encode(), b"")
            await wire.head()
            encoding = wire.headers.get(b"content-encoding", b"identity").decode("latin-1").lower()
            body = bytearray()
            while encoding == "identity" and (piece := await wire.read()):
                body += piece
                if len(body) > limit_bytes:
                    return Got(wire.status, None, encoding)
            return Got(wire.status, bytes(body) if encoding == "identity" else None, encoding)
        except WireLost as lost:
            if wire.used and lost.unanswered:
                raise _Stale from lost
            raise
        finally:
            self._pool.give_back(wire)


class _Stale(Exception):
    """The connection was no more, and nobody's question was answered on it."""
