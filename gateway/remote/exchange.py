"""One request to a remote server and its answer, over a pool of connections.

What is bounded here: the time to an answer's first byte and between two reads, and through
`read_all` its size. What is read may be cut anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic
from types import TracebackType
from typing import NamedTuple

from gateway.remote.failures import LossKind, UpstreamLost, answer_too_long
from gateway.remote.pool import Origin, Pool
from gateway.remote.wire import Wire, WireLost

_RACE_S = 1.0
"""A kept connection that is lost so soon, without a byte of an answer, was closing already."""
_LOOK_S = 5.0
"""How often silent exchanges and old connections are looked for at least, while there are any."""
_STANDSTILL_S = 0.5
"""A look that is later by more was held up with all of this process, which was stopped, say: what
the servers have sent meanwhile is unread yet, and they must not be taken for silent."""
_DRAIN_S = 0.25
_DRAIN_READS = 4
_NEVER_S = float("inf")


class Patience(NamedTuple):
    """How many seconds to wait for the head of an answer, and for each read after that."""

    first_byte_s: float
    between_s: float


class Connections:
    """The connections to one server. An async scope; what is open when it ends is cut off."""

    def __init__(self, base_url: str, headers: Mapping[str, str], max_running: int) -> None:
        """`headers` go along with every request. Raises ValueError for what cannot be a part of
        one."""
        self._origin = Origin.of(base_url)
        self._fields = _fields(headers)
        self._limit = 2 * max_running
        self._heads: dict[str, bytes] = {}
        self._open: set[Exchange] = set()
        self._drains: set[asyncio.Task[None]] = set()
        self._look_timer: asyncio.TimerHandle | None = None
        self._look_at_s = _NEVER_S
        self.last_heard_s = float("-inf")
        """When the last byte of any answer came."""

    async def __aenter__(self) -> Connections:
        self._pool = Pool(self._origin, self._limit)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cut_silent(_NEVER_S, LossKind.RESET)
        if self._drains:
            await asyncio.wait(tuple(self._drains))
        if self._look_timer is not None:
            self._look_timer.cancel()
        await self._pool.close()

    @property
    def open_exchanges(self) -> int:
        """How many there are now."""
        return len(self._open)

    def exchange(
        self, path: str, body: bytes, headers: Mapping[str, str], patience: Patience
    ) -> Exchange:
        """POST a body; opening the result sends it. Raises ValueError for a header that is none."""
        head = self._heads.get(path)
        if head is None:
            origin = self._origin
            head = self._heads[path] = (
                f"POST {origin.base_path}{path} HTTP/1.1\r\nhost: {origin.authority}\r\n".encode()
                + self._fields
            )
        head = b"%b%bcontent-length: %d\r\n\r\n" % (head, _fields(headers), len(body))
        return Exchange(self, self._pool, head, body, patience)

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

    def look_within(self, delay_s: float) -> None:
        """Somebody has begun to wait, for so long at most: one timer serves all of them."""
        now_s = monotonic()
        at_s = now_s + min(delay_s, _LOOK_S)
        if self._look_at_s <= at_s:
            return
        if self._look_timer is not None:
            self._look_timer.cancel()
        self._look_at_s = at_s
        self._look_timer = asyncio.get_running_loop().call_later(at_s - now_s, self._look)

    def _look(self) -> None:
        """Cut off who has been silent for too long, and see when to look again."""
        now_s = monotonic()
        late_s = now_s - self._look_at_s
        self._look_timer, self._look_at_s = None, _NEVER_S
        self._pool.drop_old()
        if late_s > _STANDSTILL_S:
            for exchange in self._open:
                exchange.last_heard_s = now_s
        next_s = _LOOK_S if self._open or self._pool.has_idle else _NEVER_S
        for exchange in tuple(self._open):
            left_s = exchange.patience_left_s(now_s)
            if left_s <= 0:
                exchange.cut(LossKind.STALLED)
            else:
                next_s = min(next_s, left_s)
        if next_s < _NEVER_S:
            self.look_within(next_s)


class Exchange:
    """Its scope, or `open` and `close`, begins when the head of the answer has come and ends the
    answer, whole or not: a server that is still sending is disconnected from.

    Everything but what the caller does raises UpstreamLost, unless it says otherwise.
    """

    __slots__ = (
        "_body",
        "_connections",
        "_cut_by",
        "_head",
        "_opening",
        "_patience",
        "_pool",
        "_waits_s",
        "_wire",
        "last_heard_s",
        "sent_s",
    )

    def __init__(
        self,
        connections: Connections,
        pool: Pool,
        head: bytes,
        body: bytes,
        patience: Patience,
    ) -> None:
        self._connections = connections
        self._pool = pool
        self._head = head
        self._body = body
        self._patience = patience
        self._wire: Wire | None = None
        self._opening: asyncio.Timeout | None = None
        self._cut_by: LossKind | None = None
        self._waits_s = _NEVER_S
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
        """Send the request and wait for the head of its answer; `close` it later on every path.

        A connection that the server was closing when it was used is no fault of anybody's: the
        request, which no byte has answered, is sent once more on a new one.
        """
        self.sent_s = self.last_heard_s = monotonic()
        self._connections._open.add(self)
        try:
            wire = self._wire = await self._pool.spare() or await self._taken(fresh=False)
            try:
                await self._asked(wire)
            except WireLost as lost:
                is_race = wire.used and lost.unanswered and monotonic() - self.sent_s <= _RACE_S
                if not is_race or self._cut_by is not None:
                    raise
                self._wire = None
                self._pool.give_back(wire)
                self._wire = wire = await self._taken(fresh=True)
                await self._asked(wire)
            encoding = wire.headers.get(b"content-encoding", b"identity").lower()
            # what is no 200 says enough by its status
            if wire.status == 200 and encoding != b"identity":
                raise UpstreamLost(LossKind.GARBAGE, "an encoding that was not asked for")
        except WireLost as lost:
            self.close()
            raise self._lost(lost) from None
        except BaseException:
            self.close()
            raise
        finally:
            self._body = b""

    def close(self) -> None:
        """End the answer, whole or not. Idempotent."""
        self._connections._open.discard(self)
        if self._wire is not None:
            wire, self._wire = self._wire, None
            # of an answer that was read to its end, the connection is kept
            self._pool.give_back(wire)

    @property
    def status(self) -> int:
        """The answer's status."""
        return self._answer.status

    @property
    def heard_s(self) -> float:
        """When the last of what has come did; it may have waited to be read."""
        return self._answer.heard_s

    def header(self, name: str) -> str | None:
        """One of the answer's headers, by its lower-case name."""
        value = self._answer.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    async def read(self) -> bytes:
        """What has come since the last read, at least a byte; nothing at the end."""
        wire = self._answer
        self.last_heard_s = monotonic()  # a pause between two reads is not the server's
        self._wait(self._patience.between_s)
        try:
            piece = await wire.read()
        except WireLost as lost:
            raise self._lost(lost) from None
        finally:
            self._waits_s = _NEVER_S
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
        if self._answer.complete:
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

    def patience_left_s(self, now_s: float) -> float:
        """How much longer whoever waits will; infinite while nobody does."""
        return self.last_heard_s + self._waits_s - now_s

    def cut(self, kind: LossKind) -> None:
        """End it from outside: whoever waits for it hears that it was lost, and how."""
        if self._cut_by is not None:
            return
        self._cut_by = kind
        if self._opening is not None:
            self._opening.reschedule(asyncio.get_running_loop().time())
        elif self._wire is not None:
            self._wire.abort()

    @property
    def _answer(self) -> Wire:
        if self._wire is None:
            raise RuntimeError("an exchange has an answer only inside its scope")
        return self._wire

    async def _taken(self, *, fresh: bool) -> Wire:
        """A connection that has to be waited for."""
        left_s = self.sent_s + self._patience.first_byte_s - monotonic()
        try:
            async with asyncio.timeout(left_s) as self._opening:
                return await self._pool.take(fresh=fresh)
        except TimeoutError:
            raise UpstreamLost(self._cut_by or LossKind.STALLED, "no answer") from None
        finally:
            self._opening = None

    async def _asked(self, wire: Wire) -> None:
        """Send the request and wait for the answer's head. Raises WireLost."""
        wire.ask(self._head, self._body)
        self._wait(self._patience.first_byte_s)
        try:
            await wire.head()
        finally:
            self._waits_s = _NEVER_S
        self._note_heard()

    def _wait(self, longest_s: float) -> None:
        self._waits_s = longest_s
        self._connections.look_within(longest_s)

    def _note_heard(self) -> None:
        self.last_heard_s = self._connections.last_heard_s = monotonic()

    def _lost(self, lost: WireLost) -> UpstreamLost:
        return UpstreamLost(self._cut_by or lost.kind, str(lost))


def _fields(headers: Mapping[str, str]) -> bytes:
    """The lines of these headers. Raises ValueError where one would be more than a line."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers) or "\0" in lines:
        raise ValueError("a header that is more than one line")
    return lines.encode()
