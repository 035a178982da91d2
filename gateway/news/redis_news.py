"""News through the Redis that the gateways share.

Telling and hearing run beside the requests: `routed`, `loads` and `foreign` touch memory only,
whatever Redis does. While it does not answer, decisions wait to be told, the oldest dropped beyond
a bound, and `SILENCE_S` later the other gateways count as gone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from time import monotonic

import structlog
from redis.exceptions import RedisError

from gateway.named_cache_store import open_control_client
from gateway.news.fleet_news import NO_LOAD, NewsCounts, OwnLoad, RoutedCallback
from gateway.news.hearing import Hearing
from gateway.news.messages import (
    LoadNews,
    pack_loads,
    pack_routed,
    unpack_loads,
    unpack_routed,
)
from gateway.news.peers import Peers
from gateway.news.sealed_news import NewsKind, NewsSealer
from gateway.news.streams import BLOCK_S, NewsStreams
from gateway.news.telling import Telling

_log = structlog.get_logger("forebay.news")

_PACE_S = 0.05  # between two times of telling
_HEARTBEAT_S = 0.5
_TRIM_S = 10.0
_FIRST_RETRY_S = 0.25
_LAST_RETRY_S = 5.0
_CANCEL_AGAIN_S = 0.1

_DOWN = (RedisError, OSError, TimeoutError)


@asynccontextmanager
async def open_news(
    url: str,
    secret: bytes,
    *,
    on_routed: RoutedCallback,
    timeout_s: float = 0.5,
    tls_ca: Path | None = None,
    cluster: bool = False,
    clock: Callable[[], float] = monotonic,
) -> AsyncIterator[RedisNews]:
    """Tell and hear until left, then say goodbye. A Redis that does not answer is not an error.

    No request waits for anything here, so `timeout_s`, the bound of one exchange, may be generous.
    """
    async with AsyncExitStack() as held:
        client = open_control_client(
            url, timeout_s=BLOCK_S + timeout_s, tls_ca=tls_ca, cluster=cluster
        )
        held.push_async_callback(client.aclose)
        streams = NewsStreams(client, timeout_s)
        news = RedisNews(streams, secret, on_routed=on_routed, clock=clock)
        held.push_async_callback(news.say_goodbye)
        running = asyncio.create_task(news.run(), name="news")
        held.push_async_callback(_end, running)
        yield news


class RedisNews:
    """`FleetNews` among all gateways with the same secret on one Redis."""

    def __init__(
        self,
        streams: NewsStreams,
        secret: bytes,
        *,
        on_routed: RoutedCallback,
        clock: Callable[[], float],
    ) -> None:
        self._streams = streams
        self._sealer = NewsSealer(secret)
        self._on_routed = on_routed
        self._clock = clock
        self._telling = Telling()
        self._hearing = Hearing()
        self._peers = Peers()
        self._wake = asyncio.Event()
        self._caught_up = asyncio.Event()
        self._own: dict[str, OwnLoad] = {}
        self._told_own: dict[str, OwnLoad] = {}
        self._next_heartbeat_s = float("-inf")
        self._next_trim_s = float("-inf")
        self._connected = False
        self._outage_said = False
        self._failed_before = False
        self._refused = 0
        self._sent_bytes = 0

    @property
    def gateways(self) -> int:
        """Those heard within `SILENCE_S`, and this one; in an outage soon this one alone."""
        return 1 + self._peers.live(self._clock())

    @property
    def degraded(self) -> bool:
        """From the start until the backlog has been read, and while Redis does not answer."""
        return not self._connected

    @property
    def counts(self) -> NewsCounts:
        """What was told and heard."""
        return NewsCounts(
            told=self._telling.told,
            dropped=self._telling.dropped,
            heard=self._hearing.heard,
            unresolved=self._hearing.unresolved,
            refused=self._refused,
            sent_bytes=self._sent_bytes,
        )

    def routed(self, replica: str, links: Sequence[bytes]) -> None:
        """Noted here, told by the task."""
        self._telling.add(replica, links)
        self._wake.set()

    def loads(self, loads: Mapping[str, OwnLoad]) -> None:
        """Noted here, told by the task if it differs from what was told last."""
        self._own = {replica: load for replica, load in loads.items() if load != NO_LOAD}
        if self._own != self._told_own:
            self._wake.set()

    def foreign(self, replica: str, now_s: float) -> OwnLoad:
        """The sum over the others that are alive."""
        return self._peers.foreign(replica, now_s)

    async def caught_up(self, within_s: float) -> bool:
        """Wait until what others told before has been read for the first time; False if it was not
        in time. A gateway may do without: it guesses worse at first."""
        try:
            async with asyncio.timeout(within_s):
                await self._caught_up.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Tell and hear until cancelled, through every outage."""
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                await self._follow()
            except _DOWN as failure:
                self._say_outage(failure)
            except Exception:  # noqa: BLE001 - a bug in telling must not end hearing for good
                _log.exception("telling and hearing of other gateways failed; trying again")
            if self._connected:
                self._connected = False
                retry_s = _FIRST_RETRY_S
            with suppress(*_DOWN):
                await self._streams.disconnect()
            # not all gateways in the same moment, when a Redis comes back
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, _LAST_RETRY_S)

    async def say_goodbye(self) -> None:
        """Let the others know at once that nothing of this gateway is under way any more. After
        `run` has ended."""
        if self._connected:
            leaving = pack_loads(LoadNews({}, leaving=True))
            with suppress(*_DOWN):
                message = self._sealer.seal(NewsKind.LOADS, leaving)
                await self._streams.add(NewsKind.LOADS, [message])

    async def _follow(self) -> None:
        """One stretch without an outage. Ends only by raising."""
        # the server may have been restarted, and have lost what was told
        self._telling.begin_generation(self._clock())
        # no decisions yet: they would be lost with an attempt that fails
        await self._tell_loads(self._own)
        self._streams.resume()
        both = [
            asyncio.create_task(self._hear_for_ever(), name="news-hear"),
            asyncio.create_task(self._tell_for_ever(), name="news-tell"),
        ]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(*both)
        failures = [task.exception() for task in both if not task.cancelled()]
        raise next(failure for failure in failures if failure is not None)

    async def _tell_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_PACE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._next_heartbeat_s - self._clock()):
                    await self._wake.wait()
            self._wake.clear()
            if self._own != self._told_own or self._clock() >= self._next_heartbeat_s:
                await self._tell_loads(self._own)
            # however many there are, the next sign of life is in time
            while self._telling.waiting and self._clock() < self._next_heartbeat_s:
                await self._tell_decisions()

    async def _tell_decisions(self) -> None:
        """As many of those that wait as are told at once."""
        now_s = self._clock()
        news = self._telling.take(now_s)
        delivered = False
        try:
            messages = [self._sealer.seal(NewsKind.ROUTED, pack_routed(each)) for each in news]
            await self._streams.add(NewsKind.ROUTED, messages)
            delivered = True
        finally:
            if not delivered:  # or perhaps so, where the wait was cut short
                self._telling.lost(news, now_s)
        self._sent_bytes += sum(map(len, messages))
        if now_s >= self._next_trim_s:
            await self._streams.trim()
            self._next_trim_s = now_s + _TRIM_S

    async def _tell_loads(self, own: dict[str, OwnLoad]) -> None:
        """Which is a sign of life too."""
        message = self._sealer.seal(NewsKind.LOADS, pack_loads(LoadNews(own)))
        await self._streams.add(NewsKind.LOADS, [message])
        self._sent_bytes += len(message)
        self._told_own = own
        self._next_heartbeat_s = self._clock() + _HEARTBEAT_S

    async def _hear_for_ever(self) -> None:
        behind = True
        while True:
            messages = await self._streams.read(wait=not behind)
            if behind and not messages:
                behind = False
                self._say_connected()
            for kind, message in messages:
                self._hear(kind, message)
                await asyncio.sleep(0)  # a backlog must not hold up the requests

    def _hear(self, kind: NewsKind, message: bytes) -> None:
        if self._sealer.is_own(message):
            return
        opened = self._sealer.open(kind, message)
        if opened is None:
            self._refuse()
            return
        sender, plain = opened
        try:
            news = unpack_routed(plain) if kind is NewsKind.ROUTED else unpack_loads(plain)
        except ValueError:
            self._refuse()
            return
        now_s = self._clock()
        if not isinstance(news, LoadNews):
            for replica, links in self._hearing.hear(sender, news, now_s):
                self._on_routed(replica, links)
        elif news.leaving:
            self._peers.leave(sender)
        else:
            self._peers.hear(sender, news.loads, now_s)

    def _refuse(self) -> None:
        if not self._refused:
            _log.warning(
                "news of another gateway are ignored: damaged, of another version, or under "
                "another server secret"
            )
        self._refused += 1

    def _say_connected(self) -> None:
        self._connected = True
        self._caught_up.set()
        if self._outage_said:
            self._outage_said = False
            _log.info("Redis answers again: gateways hear of each other")

    def _say_outage(self, failure: Exception) -> None:
        # Not of the very first attempt: while a gateway starts, its loop may be held up for longer
        # than Redis is given to answer.
        first = not self._failed_before and not self._caught_up.is_set()
        self._failed_before = True
        if not first and not self._outage_said:
            self._outage_said = True
            # the kind of error only: its text may repeat what was sent
            _log.warning(
                "Redis does not answer: gateways do not hear of each other",
                error=type(failure).__name__,
            )


async def _end(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks until they have ended, also if this is cancelled meanwhile: what they use is
    closed next.

    Once is not enough: redis's client sends with `asyncio.wait_for`, which in Python 3.11 swallows
    a cancellation that comes in its last moment.
    """
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen: who ends them does not want to know
    if cancelled is not None:
        raise cancelled
