"""The link to one Redis: connections, deadlines, the breaker. Lives on the store's event loop.

Exactly one attempt per question: redis-py's own retries are off. Connections are shared out in
lanes, so that a small question never waits behind a large value: one for control, one for stores
and what else nobody waits for, the others for loads.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from enum import StrEnum
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.exceptions import ReadOnlyError, ResponseError

from cache.breaker import Breaker
from cache.redis_client import (
    CONNECT_S,
    TROUBLE,
    Command,
    cluster_client,
    drop_connections,
    pipelined,
    plain_client,
    reason_of,
    scanned,
)
from cache.redis_connection import Progress
from cache.redis_options import RedisOptions
from cache.redis_server import ServerFacts, read_facts, same_secret

_log = logging.getLogger("forebay.cache")

_SCAN_PAUSE_S = 0.005
_SCAN_S = 1.0


class Down(Exception):
    """Redis cannot be asked, or gave no usable answer."""


class Late(Exception):
    """The answer did not come in time."""


class Busy(Late):
    """Other questions kept every connection of the lane."""


class Lane(StrEnum):
    """Which connections a question goes over. `STORE` also takes what nobody waits for."""

    CONTROL = "control"
    STORE = "store"
    LOAD = "load"


class RedisLink:
    """All methods but `up`, `facts`, `server_lives`, `secret_agrees` and `settled` belong to the
    loop's thread."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._breaker = Breaker(starts_open=True)
        self._progress = Progress()
        self._client: Redis | RedisCluster | None = None
        self._lanes = {
            Lane.CONTROL: asyncio.Semaphore(1),
            Lane.STORE: asyncio.Semaphore(1),
            Lane.LOAD: asyncio.Semaphore(options.max_connections - 2),
        }
        self._broke = asyncio.Event()
        self._mended = asyncio.Event()
        self._outage_told = False
        self._danger_told = False
        self.facts = ServerFacts()
        self.server_lives = 0
        """Grows when Redis answers that may have been started anew, and have lost what it held."""
        self.secret_agrees: bool | None = None
        """Whether Redis is used under the same server secret; None while it was never asked."""
        self.settled = threading.Event()
        """Set when the first attempt to connect has ended, either way."""

    @property
    def up(self) -> bool:
        """Whether questions are answered by Redis; any thread may ask."""
        return self._breaker.closed

    @property
    def times_opened(self) -> int:
        """How often the breaker has opened; any thread may ask."""
        return self._breaker.opened

    async def keep_connected(self) -> None:
        """Connect, and again after every outage. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                wait_s = self._breaker.wait_s(loop.time())
                if wait_s is None:
                    self._broke.clear()
                    await self._broke.wait()
                elif wait_s > 0:
                    await asyncio.sleep(wait_s)
                if self._breaker.start_probe(loop.time()):
                    await self._probe_server()
                    self.settled.set()
        finally:
            await self._drop_client()

    async def wait_up(self) -> None:
        """Return once questions are answered by Redis."""
        while not self.up:
            self._mended.clear()
            await self._mended.wait()

    async def ask(
        self, lane: Lane, commands: Sequence[Command], until_s: float, *, patience_s: float = 0.0
    ) -> list[Any]:
        """The replies to `commands`; see `stream`."""
        replies: list[Any] = []
        await self.stream(lane, commands, until_s, replies.append, patience_s=patience_s)
        return replies

    async def stream(
        self,
        lane: Lane,
        commands: Sequence[Command],
        until_s: float,
        take: Callable[[Any], None],
        *,
        patience_s: float = 0.0,
    ) -> None:
        """Send `commands`, pipelined, and hand each reply to `take` as it arrives; where Redis
        refused a command the reply is a ResponseError. `until_s` is on the loop's clock.

        Silence of `timeout_s` (or of `patience_s`, if that is longer) opens the breaker; so do
        several failures in a row. Raises Late when `until_s` passes, Down otherwise.
        """
        clean, writable = True, True

        def heard(reply: Any) -> None:
            nonlocal clean, writable
            clean = clean and not isinstance(reply, ResponseError)
            writable = writable and not isinstance(reply, ReadOnlyError)
            take(reply)

        semaphore = self._lanes[lane]
        try:
            async with asyncio.timeout_at(until_s):
                await semaphore.acquire()
        except TimeoutError:
            raise Busy("no free connection") from None
        try:
            if not self.up or self._client is None:
                raise Down("not connected")
            silence_s = max(self._options.timeout_s, patience_s)
            question = pipelined(self._client, commands, heard)
            await self._answered(question, until_s, silence_s)
            if clean:
                self._breaker.success()
            if not writable:
                await drop_connections(self._client, in_use=False)
        finally:
            semaphore.release()

    async def ask_control(self, commands: Sequence[Command]) -> list[Any]:
        """Like `ask`, on the control lane, within `timeout_s`. Running out of it is silence, unless
        other answers kept coming. Raises Late or Down."""
        loop = asyncio.get_running_loop()
        timeout_s = self._options.timeout_s
        started_s = loop.time()
        try:
            return await self.ask(Lane.CONTROL, commands, started_s + timeout_s)
        except Busy:
            raise  # who holds the lane finds out what is wrong
        except Late:
            if self.up and self._progress.last_s <= started_s:
                self._stall(f"no answer within {timeout_s * 1000:.0f} ms")
            elif self.up:
                self._failure("busy")
            raise

    async def scan(self, pattern: bytes) -> AsyncIterator[list[bytes]]:
        """Keys that match, on every node, some at a time with a pause between; a key may come
        twice. Raises Late or Down."""
        for node in self._nodes():
            cursor = 0
            while True:
                cursor, keys = await self._scan_some(node, cursor, pattern)
                yield keys
                if cursor == 0:
                    break
                await asyncio.sleep(_SCAN_PAUSE_S)

    async def look_for_new_life(self) -> None:
        """Ask the server who it is: one that was restarted while nobody asked anything, or between
        two questions, shows by nothing else. Not for a cluster. Raises Late or Down."""
        client = self._client
        if not self.up or client is None:
            raise Down("not connected")
        if isinstance(client, RedisCluster):
            return
        patience_s = max(_SCAN_S, self._options.timeout_s)
        until_s = asyncio.get_running_loop().time() + patience_s
        async with self._lanes[Lane.STORE]:
            facts = await self._answered(read_facts(client), until_s, patience_s)
        if facts.run_id and facts.run_id != self.facts.run_id:
            self.server_lives += 1
            self.facts = facts

    def _nodes(self) -> list[ClusterNode | None]:
        if isinstance(self._client, RedisCluster):
            return list(self._client.get_primaries())
        return [None]

    async def _scan_some(
        self, node: ClusterNode | None, cursor: int, pattern: bytes
    ) -> tuple[int, list[bytes]]:
        client = self._client
        if not self.up or client is None:
            raise Down("not connected")
        patience_s = max(_SCAN_S, self._options.timeout_s)
        until_s = asyncio.get_running_loop().time() + patience_s
        async with self._lanes[Lane.STORE]:
            question = scanned(client, node, cursor, pattern)
            found = await self._answered(question, until_s, patience_s)
            return int(found[0]), found[1]

    async def _answered(
        self, question: Coroutine[Any, Any, Any], until_s: float, silence_s: float
    ) -> Any:
        """What `question` returns, if it does so before `until_s` and with no silence of
        `silence_s`. It has ended in any case when this returns or raises."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        task = asyncio.ensure_future(question)
        try:
            while not task.done():
                silent_at_s = max(started_s, self._progress.last_s) + silence_s
                wait_s = min(silent_at_s, until_s) - loop.time()
                if wait_s > 0:
                    await asyncio.wait({task}, timeout=wait_s)
                elif not await _done_after_io(task):
                    if until_s <= loop.time():
                        raise Late("deadline passed")
                    if max(started_s, self._progress.last_s) + silence_s <= loop.time():
                        self._stall(f"no answer within {silence_s * 1000:.0f} ms")
                        raise Down("silent")
            return task.result()
        except TROUBLE as error:
            self._failure(reason_of(error))
            raise Down(reason_of(error)) from None
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _probe_server(self) -> None:
        """One attempt to connect and to be answered in time."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._connect()
            async with asyncio.timeout(self._options.timeout_s):
                await self._ping()
        except TROUBLE as error:
            await self._drop_client()
            self._breaker.probe_failed(loop.time())
            self._tell_outage(reason_of(error))
            return
        self._breaker.probe_succeeded()
        self._mended.set()
        if self._outage_told:
            self._outage_told = False
            _log.info("Redis at %s answers again", self._options.location)

    async def _connect(self) -> None:
        await self._drop_client()
        client = plain_client(self._options, self._progress)
        self._client = client
        facts = await read_facts(client)
        if not facts.is_same_life(self.facts):
            self.server_lives += 1
        self.facts = facts
        if self.facts.cluster or self._options.cluster:
            await self._drop_client()
            self._client = await cluster_client(self._options, self._progress)
        if self.facts.danger is not None and not self._danger_told:
            self._danger_told = True
            _log.warning(
                "Redis at %s has maxmemory-policy %s: %s; use volatile-lru",
                self._options.location,
                self.facts.maxmemory_policy,
                self.facts.danger,
            )
        agrees = await same_secret(self._client, self._options.secret)
        if agrees is False and self.secret_agrees is not False:
            _log.error(
                "Redis at %s is in use under another server secret: gateways that share it must "
                "share the secret, or they share no KV",
                self._options.location,
            )
        self.secret_agrees = agrees

    async def _ping(self) -> None:
        if self._client is not None:
            await self._client.ping()

    def trouble(self, reply: ResponseError) -> None:
        """Redis refused a question that a working one answers: counts towards the breaker."""
        self._failure(reason_of(reply))

    def _stall(self, reason: str) -> None:
        self._breaker.stall(asyncio.get_running_loop().time())
        self._after_trouble(reason)

    def _failure(self, reason: str) -> None:
        self._breaker.failure(asyncio.get_running_loop().time())
        self._after_trouble(reason)

    def _after_trouble(self, reason: str) -> None:
        if not self.up:
            self._broke.set()
            self._tell_outage(reason)

    def _tell_outage(self, reason: str) -> None:
        """Once per outage."""
        if not self._outage_told:
            self._outage_told = True
            _log.warning(
                "Redis at %s: %s; going on without it until it answers",
                self._options.location,
                reason,
            )

    async def _drop_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            # What goes wrong while connections are thrown away changes nothing.
            await asyncio.gather(client.aclose(), return_exceptions=True)


async def _done_after_io(task: asyncio.Future[Any]) -> bool:
    """Whether `task` ends by what has already arrived: when this thread could not run for a while,
    its timers are due before it has looked at its sockets."""
    for _ in range(4):
        await asyncio.sleep(0)
        if task.done():
            return True
    return False
