"""The Redis tier's thread: one per process, with its own event loop, whatever the models.

KV traffic never runs on the gateway's loop or an engine's step loop. A dead, frozen or slow Redis
costs one question its timeout, once; until it answers a probe again, every other question is
answered at once with a miss.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from cache.envelope import KEY_PREFIX, Envelope
from cache.redis_census import Census, KeyCount
from cache.redis_client import Command, check_settings
from cache.redis_link import Down, Late, RedisLink
from cache.redis_options import RedisOptions
from cache.redis_report import Book, Fetched, Probe, Question, RedisCounters
from cache.redis_server import ServerFacts
from cache.redis_tier import RedisDown, RedisTier, Work
from cache.redis_writer import RedisWriter
from cache.sealing import Sealer

__all__ = [
    "Fetched",
    "Probe",
    "RedisCounters",
    "RedisDown",
    "RedisOptions",
    "RedisStore",
    "RedisTier",
]

_log = logging.getLogger("forebay.cache")

_CENSUS_S = 30.0


class RedisStore:
    """`start` it, make a `tier` per model, `close` it. All methods are thread-safe.

    Raises ValueError for a URL with unknown parameters.
    """

    def __init__(self, options: RedisOptions) -> None:
        check_settings(options)
        self._options = options
        self._link = RedisLink(options)
        self._census = Census()
        self._writer = RedisWriter(self._link, self._census, options.queue_bytes)
        self._book = Book()
        self._value_bytes: dict[bytes, int] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._count_is_old = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def up(self) -> bool:
        """Whether Redis answers, as far as is known."""
        return self._link.up

    @property
    def facts(self) -> ServerFacts:
        """What the server said of itself when last connected."""
        return self._link.facts

    def sealer(self) -> Sealer | None:
        """What envelopes are to seal with: None unless `encrypt` is set."""
        return Sealer(self._options.secret) if self._options.encrypt else None

    def start(self) -> None:
        """Start the thread, which connects by itself and keeps trying; a Redis that is not there is
        no error. Raises RuntimeError on a second call."""
        with self._lock:
            if self._thread is not None or self._closed:
                raise RuntimeError("a Redis store starts once")
            self._thread = threading.Thread(
                target=self._run_loop, name="forebay-redis", daemon=True
            )
            self._thread.start()
        self._started.wait()

    def wait_settled(self, timeout_s: float) -> bool:
        """Wait until the first attempt to connect has ended, at most `timeout_s`; whether Redis
        answers."""
        self._link.settled.wait(timeout_s)
        return self._link.up

    def check_secret(self, timeout_s: float) -> bool | None:
        """Whether Redis is in use under our secret (or was not in use); None if it could not be
        asked within `timeout_s`."""
        self._link.settled.wait(timeout_s)
        return self._link.secret_agrees

    def tier(self, envelope: Envelope) -> RedisTier:
        """One model's view."""
        return RedisTier(
            envelope,
            self._link,
            self._writer,
            self._census,
            self,
            self._book,
            ttl_s=self._options.ttl_s,
            max_value_bytes=self._options.max_value_bytes,
        )

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread; open questions are answered as if Redis were gone. Idempotent."""
        with self._lock:
            self._closed = True
            thread, loop = self._thread, self._loop
        if thread is not None and loop is not None and thread.is_alive():
            self._on_loop(loop, self._stop.set)
            thread.join(timeout_s)
            if thread.is_alive():
                _log.error("the Redis thread did not end within %.1f s", timeout_s)
        self._book.lose_all()

    def run(self, work: Work, question: Question[Any]) -> None:
        """Run `work` on the loop; whatever becomes of it, `question` is settled then."""
        self.call(lambda: self._begin(work, question), question)

    def call(self, function: Callable[[], None], question: Question[Any]) -> None:
        """Call `function` on the loop, or lose `question` if there is none any more."""
        loop = self._loop
        if loop is None or not self._on_loop(loop, function) or self._closed:
            # Closed: its book may have been emptied just before this question came into it.
            question.lose()

    def count_anew(self) -> None:
        """Have the census counted soon. On the loop only."""
        self._count_is_old.set()

    def _on_loop(self, loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> bool:
        try:
            loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _begin(self, work: Work, question: Question[Any]) -> None:
        if self._stop.is_set():
            question.lose()
            return

        async def settled() -> None:
            try:
                await work()
            finally:
                question.lose()

        self._keep(settled(), "a question to Redis failed")

    def _keep(self, work: Coroutine[Any, Any, None], failure: str) -> None:
        """Run `work` as a task that is held until it ends, and logged if it fails."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("%s", failure, exc_info=error)

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    def _run_loop(self) -> None:
        try:
            with asyncio.Runner(loop_factory=_new_loop) as runner:
                runner.run(self._serve())
        except Exception:  # noqa: BLE001  # a thread's last resort: say so, then settle all
            _log.exception("the Redis thread ended; the KV cache goes on without Redis")
        finally:
            self._closed = True
            self._started.set()
            self._link.settled.set()
            self._book.lose_all()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started.set()
        self._keep(self._link.keep_connected(), "keeping Redis connected failed")
        self._keep(self._writer.run(), "writing to Redis failed")
        self._keep(self._count_regularly(), "counting the blocks in Redis failed")
        try:
            await self._stop.wait()
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _count_regularly(self) -> None:
        while True:
            await self._link.wait_up()
            self._count_is_old.clear()
            try:
                await self._count()
                await self._link.look_for_new_life()
            except (Down, Late):
                _log.debug("the count of blocks in Redis was cut short")
            with suppress(TimeoutError):
                async with asyncio.timeout(_CENSUS_S):
                    await self._count_is_old.wait()

    async def _count(self) -> None:
        """Who has how much: every key by its name, one value of each identity by its size."""
        mark = self._census.start_count()
        count = KeyCount()
        async for keys in self._link.scan(KEY_PREFIX + b"*"):
            count.add(keys)
        identities = list(count.samples)
        asked: list[Command] = [("STRLEN", count.samples[identity]) for identity in identities]
        sizes = await self._link.ask_control(asked) if asked else []
        for identity, size in zip(identities, sizes, strict=True):
            # A sample that has just expired has no size; then the last one known holds.
            if isinstance(size, int) and size > 0:
                self._value_bytes[identity] = size
        self._census.finish_count(mark, count.bytes_by_holding(self._value_bytes))


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's loop where there is uvloop: it sends large values without joining them first."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
