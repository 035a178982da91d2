"""Where the records of named prefixes are kept: in memory, and in Redis for other gateways.

Memory is the working copy and always answers. Redis makes it outlive a restart and shares it: one
hash per tenant (`forebay:caches:TAG`), a field per name, each value sealed, since it holds a
prompt. Whatever Redis cannot take now is written when it next answers, if this process still runs
then. Every command is tried once, with its own time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import structlog
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from cache.redis_client import TROUBLE, drop_connections
from cache.redis_connection import RenewedTlsConnection
from gateway.named_cache import Place, Record
from gateway.named_cache_seal import RecordSealer, field_of

_log = structlog.get_logger("forebay.caches")

_HASH_PREFIX = "forebay:caches:"
_CONNECTIONS = 8
_WARNED_VALUES = 1000
_QUIET_S = 1.0
"""After a failure Redis is not asked for this long: a dead one costs one time limit, not each."""
_QUESTIONS = ("HGET", "HGETALL")
_CLOCKS_APART_S = 600.0
"""How much longer than it is of use a record stays in Redis: a gateway whose clock is ahead would
otherwise take away what others still use, and deletions of which they have not heard."""


class WorkingCopy:
    """The records in memory, of every tenant that was asked about. Event loop only."""

    def __init__(self) -> None:
        self._records: dict[bytes, dict[Place, Record]] = {}

    def merge(self, record: Record) -> bool:
        """Take a record in unless a later one of its name is known; True if it was taken."""
        own = self._records.setdefault(record.place.owner.tenant, {})
        known = own.get(record.place)
        if known is not None and not record.outdoes(known):
            return False
        own[record.place] = record
        return True

    def get(self, place: Place) -> Record | None:
        """The record of a name."""
        return self._records.get(place.owner.tenant, {}).get(place)

    def of_tenant(self, tenant: bytes) -> list[Record]:
        """The records of one tenant's names."""
        return list(self._records.get(tenant, {}).values())

    def all(self) -> Iterable[Record]:
        """Every record."""
        for own in self._records.values():
            yield from own.values()

    def drop_expired(self, now_s: float) -> None:
        """Forget what nobody can use any more."""
        for tenant, own in list(self._records.items()):
            kept = {place: record for place, record in own.items() if record.expires_s > now_s}
            if kept:
                self._records[tenant] = kept
            else:
                del self._records[tenant]


class NamedCacheStore(Protocol):
    """A working copy, and what stands behind it. Nothing here raises when that is down."""

    @property
    def copy(self) -> WorkingCopy:
        """What is known now."""
        ...

    async def look_up(self, place: Place, now_s: float) -> None:
        """Bring the copy of one name up to date."""
        ...

    async def refresh(self, tenant: bytes, now_s: float) -> bool:
        """Bring the copy of one tenant's names up to date, both ways; False if it may not be."""
        ...

    async def write(self, records: Iterable[Record], now_s: float) -> None:
        """Take changes in and pass them on."""
        ...


class MemoryStore:
    """Names that live as long as the process."""

    def __init__(self) -> None:
        self._copy = WorkingCopy()

    @property
    def copy(self) -> WorkingCopy:
        """All there is."""
        return self._copy

    async def look_up(self, place: Place, now_s: float) -> None:
        """Nobody else changes anything; a name that has expired is forgotten."""
        record = self._copy.get(place)
        if record is not None and record.expires_s <= now_s:
            self._copy.drop_expired(now_s)

    async def refresh(self, tenant: bytes, now_s: float) -> bool:  # noqa: ARG002 - all alike
        """Forget what has expired."""
        self._copy.drop_expired(now_s)
        return True

    async def write(self, records: Iterable[Record], now_s: float) -> None:
        """Keep the later one of each name."""
        self._copy.drop_expired(now_s)
        for record in records:
            self._copy.merge(record)


class LateNamedStore:
    """Memory until it is known which store there is, which must be before the first request."""

    def __init__(self) -> None:
        self._store: NamedCacheStore = MemoryStore()

    def use(self, store: NamedCacheStore) -> None:
        """From now on."""
        self._store = store

    @property
    def copy(self) -> WorkingCopy:
        """The store's."""
        return self._store.copy

    async def look_up(self, place: Place, now_s: float) -> None:
        """The store's."""
        await self._store.look_up(place, now_s)

    async def refresh(self, tenant: bytes, now_s: float) -> bool:
        """The store's."""
        return await self._store.refresh(tenant, now_s)

    async def write(self, records: Iterable[Record], now_s: float) -> None:
        """The store's."""
        await self._store.write(records, now_s)


class CommandClient(Protocol):
    """What is needed of `redis.asyncio.Redis` or its cluster's client, with bytes as answers."""

    async def execute_command(self, *args: Any) -> Any:
        """One command and its parsed answer."""
        ...


def open_control_client(
    url: str, *, timeout_s: float, tls_ca: Path | None = None, cluster: bool = False
) -> Redis | RedisCluster:
    """A client for small questions: few connections, bounded waits, one try each (a cluster's may
    be sent on to another node).

    It connects with its first command; `aclose` ends it. `tls_ca` may be said of another server,
    the one for KV: it is of no account where `url` is not `rediss://`.
    """
    options: dict[str, Any] = {}
    tls = url.startswith("rediss:")
    if tls and tls_ca is not None:
        options["ssl_ca_certs"] = str(tls_ca)
    if cluster:
        return RedisCluster.from_url(
            url,
            max_connections=_CONNECTIONS,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            **options,
        )
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_CONNECTIONS,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        **options,
    )
    if tls:
        pool.connection_class = RenewedTlsConnection
    return Redis.from_pool(pool)


class RedisNamedCacheStore:
    """Names that several gateways share and that outlive them.

    Only gateways with the same secret can read the values; others' are left alone, with a warning.
    `on_failure` is called for each time that Redis did not answer in `timeout_s`. The client's own
    time limits should be longer: making a connection may take more than a question.
    """

    def __init__(
        self,
        client: CommandClient,
        secret: bytes,
        *,
        timeout_s: float = 0.05,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self._client = client
        self._sealer = RecordSealer(secret)
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._copy = WorkingCopy()
        self._behind: set[bytes] = set()  # tenants whose names Redis may hold otherwise
        self._one_at_a_time = asyncio.Lock()
        self._quiet_until_s = 0.0
        self._down = False
        self._warned: set[tuple[str, str]] = set()
        self._asking: set[asyncio.Future[Any]] = set()

    async def close(self) -> None:
        """End what is under way, before the client is closed."""
        for asking in tuple(self._asking):
            asking.cancel()
        if self._asking:
            await asyncio.wait(self._asking)

    def _over(self, asking: asyncio.Future[Any]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            asking.exception()  # seen, also if nobody waits any more

    @property
    def copy(self) -> WorkingCopy:
        """What this gateway wrote, and what it has read of the others'."""
        return self._copy

    async def look_up(self, place: Place, now_s: float) -> None:
        """One HGET; a tenant whose changes Redis lacks is brought up to date as a whole."""
        tenant = place.owner.tenant
        if tenant in self._behind:
            await self.refresh(tenant, now_s)
            return
        key, field = _key(tenant), field_of(place)
        value = await self._ask("HGET", key, field)
        if isinstance(value, bytes):
            self._take(key, field, value, tenant)

    async def refresh(self, tenant: bytes, now_s: float) -> bool:
        """Read and write until both sides agree, also for tenants that Redis has missed before."""
        # one after another, so that no older value lands after a newer one
        async with self._one_at_a_time:
            self._behind.add(tenant)
            for each in [tenant, *(self._behind - {tenant})]:
                if not await self._agree(each, now_s):
                    break
                self._behind.discard(each)
            return tenant not in self._behind

    async def _agree(self, tenant: bytes, now_s: float) -> bool:
        """Read all, then write what Redis lacks and remove what expired a while ago.

        A name that is missing there was not deleted, for deletions are records too: Redis has lost
        it, and gets it back.
        """
        key = _key(tenant)
        values = await self._ask("HGETALL", key)
        if values is None:
            return False
        shared: dict[str, Record | None] = {}
        for raw, value in values.items():
            field = raw.decode(errors="replace")
            shared[field] = self._take(key, field, value, tenant)
        self._copy.drop_expired(now_s)
        ours = {field_of(record.place): record for record in self._copy.of_tenant(tenant)}
        lacking = {
            field: self._sealer.seal(key, field, record)
            for field, record in ours.items()
            if (known := shared.get(field)) is None or record.outdoes(known)
        }
        expired = [
            field
            for field, record in shared.items()
            if record is not None
            and record.expires_s + _CLOCKS_APART_S <= now_s
            and field not in ours
        ]
        if lacking:
            pairs = chain.from_iterable(lacking.items())
            if await self._ask("HSET", key, *pairs) is None:
                return False
        return not expired or await self._ask("HDEL", key, *expired) is not None

    async def write(self, records: Iterable[Record], now_s: float) -> None:
        """Keep the later one of each name, here and there."""
        tenants = set()
        for record in records:
            if self._copy.merge(record):
                tenants.add(record.place.owner.tenant)
        for tenant in tenants:
            await self.refresh(tenant, now_s)

    def _take(self, key: str, field: str, value: bytes, tenant: bytes) -> Record | None:
        """The record in a value, taken into the copy; None for one that is not ours to read."""
        record = self._sealer.open(key, field, value, tenant)
        if record is None:
            if (key, field) not in self._warned and len(self._warned) < _WARNED_VALUES:
                self._warned.add((key, field))
                _log.warning(
                    "a named prefix in Redis is ignored: damaged, or sealed under another secret",
                    key=key,
                )
            return None
        self._copy.merge(record)
        return record

    async def _ask(self, *command: Any) -> Any:
        """The answer, or None where Redis has none to give in time, or was just seen not to."""
        if monotonic() < self._quiet_until_s:
            return None
        asking = asyncio.ensure_future(self._client.execute_command(*command))
        self._asking.add(asking)
        asking.add_done_callback(self._over)
        try:
            await asyncio.wait({asking}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            asking.cancel()
            raise
        try:
            if not asking.done() or asking.cancelled():
                # a question may go on: if it was connecting that took long, the next one need not
                if command[0] not in _QUESTIONS:
                    asking.cancel()
                raise TimeoutError
            answer = asking.result()
        except TROUBLE as error:
            self._quiet_until_s = monotonic() + _QUIET_S
            if self._on_failure is not None:
                self._on_failure()
            if not self._down:
                self._down = True
                # the kind of error only: its text may repeat what was sent
                _log.warning(
                    "Redis does not answer: named prefixes are in this process's memory only",
                    error=type(error).__name__,
                )
            if isinstance(error, ResponseError):
                with suppress(*TROUBLE):
                    await drop_connections(self._client, in_use=False)
            return None
        if self._down:
            self._down = False
            _log.info("Redis answers again: named prefixes are shared")
        return answer


def _key(tenant: bytes) -> str:
    return _HASH_PREFIX + tenant.hex()
