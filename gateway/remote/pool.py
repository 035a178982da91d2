"""The connections to one server: opened when none is to spare, kept for a while when unused."""

from __future__ import annotations

import asyncio
import errno
import ssl
from time import monotonic
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from gateway.remote.authorities import Authorities
from gateway.remote.failures import LossKind, UpstreamLost
from gateway.remote.host_name import HostName
from gateway.remote.wire import Wire

_CONNECT_S = 5.0
_NEXT_ADDRESS_S = 1.0
"""Without a connection for so long, the next of a server's addresses is tried."""
_IDLE_S = 4.0
"""How long a connection is kept for the next request: less than the 5 s after which uvicorn, and
with it vLLM and SGLang, closes it."""
_PATH_SAFE = "/%!$&'()*+,;=:@~-._"


class Origin(NamedTuple):
    """Where a server is: `authority` is what a request's `host` says, `base_path` what all its
    paths begin with."""

    host: str
    port: int
    tls: bool
    authority: str
    base_path: str

    @classmethod
    def of(cls, url: str) -> Origin:
        """From an http or https URL with a host. Raises ValueError for a name that is none."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        if not host.isascii():
            host = host.encode("idna").decode()
        tls = parts.scheme == "https"
        usual_port = 443 if tls else 80
        port = parts.port or usual_port
        named = f"[{host}]" if ":" in host else host
        authority = named if port == usual_port else f"{named}:{port}"
        return cls(host, port, tls, authority, quote(parts.path, safe=_PATH_SAFE))


class Pool:
    """Belongs to the event loop. Whoever has taken a wire gives it back, on every path.

    At most `limit` are taken at once; who comes then waits for one.
    """

    def __init__(self, origin: Origin, limit: int) -> None:
        self._origin = origin
        self._host_name = HostName(origin.host, origin.port)
        self._places = asyncio.Semaphore(limit)
        self._authorities = Authorities() if origin.tls else None
        self._idle: list[Wire] = []
        self._wires: set[Wire] = set()
        self._answered_last = ""
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._closed = False

    @property
    def has_idle(self) -> bool:
        """Whether any connection is kept for the next request."""
        return bool(self._idle)

    async def spare(self) -> Wire | None:
        """Take a kept connection, if there is one that need not be waited for. Does not wait."""
        if self._places.locked() or (wire := self._kept()) is None:
            return None
        await self._places.acquire()
        return wire

    async def take(self, *, fresh: bool = False) -> Wire:
        """Take a connection, waiting for a place and opening one if need be; a `fresh` one is
        opened in any case. Raises UpstreamLost where the server cannot be reached."""
        await self._places.acquire()
        try:
            return (None if fresh else self._kept()) or await self._opened()
        except BaseException:
            self._places.release()
            raise

    def give_back(self, wire: Wire) -> None:
        """Keep it for the next request if it can be used again, close it if not."""
        self._places.release()
        if wire.may_be_used and not self._closed:
            wire.rest()
            self._idle.append(wire)
        else:
            wire.abort()

    def drop_old(self) -> None:
        """Close what has been kept for too long."""
        oldest_s = monotonic() - _IDLE_S
        kept = [wire for wire in self._idle if wire.idle_since_s > oldest_s]
        for wire in self._idle:
            if wire.idle_since_s <= oldest_s:
                wire.abort()
        self._idle = kept

    async def close(self) -> None:
        """Close all connections, those in use too, and wait until they are."""
        self._closed = True
        self._idle.clear()
        for wire in tuple(self._wires):
            wire.abort()
        await self._none_left.wait()

    def _kept(self) -> Wire | None:
        """The one that was used last: it is the least likely to be closed by the server."""
        oldest_s = monotonic() - _IDLE_S
        while self._idle:
            wire = self._idle.pop()
            if wire.may_be_used and wire.idle_since_s > oldest_s:
                return wire
            wire.abort()
        return None

    async def _opened(self) -> Wire:
        """Try the server's addresses in turn, the one that answered last first."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                addresses = sorted(
                    await self._host_name.addresses(),
                    key=lambda address: address != self._answered_last,
                )
                failure: OSError | None = None
                for address in addresses:
                    is_last = address is addresses[-1]
                    try:
                        async with asyncio.timeout(None if is_last else _NEXT_ADDRESS_S):
                            return await self._dial(address)
                    except OSError as error:  # a TimeoutError is one
                        failure = error
        except TimeoutError:
            raise UpstreamLost(LossKind.REFUSED, "no connection in time") from None
        except (OSError, UnicodeError) as error:
            raise _unreached(error) from error
        raise _unreached(failure) from failure

    async def _dial(self, address: str) -> Wire:
        origin, authorities = self._origin, self._authorities
        try:
            _, wire = await asyncio.get_running_loop().create_connection(
                lambda: Wire(self._forget),
                address,
                origin.port,
                ssl=None if authorities is None else authorities.context,
                server_hostname=None if authorities is None else origin.host,
            )
        except ssl.SSLCertVerificationError:
            if authorities is not None:
                authorities.not_believed()
            raise
        if not wire.is_open:
            raise ConnectionResetError
        self._answered_last = address
        self._wires.add(wire)
        self._none_left.clear()
        if self._closed:
            wire.abort()
        return wire

    def _forget(self, wire: Wire) -> None:
        """It is no more."""
        self._wires.discard(wire)
        if not self._wires:
            self._none_left.set()
        if wire in self._idle:
            self._idle.remove(wire)


def _unreached(error: Exception | None) -> UpstreamLost:
    kind = LossKind.REFUSED
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        kind = LossKind.NO_FILES  # which says nothing of the server
    return UpstreamLost(kind, type(error).__name__)
