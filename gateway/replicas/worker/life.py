"""One life of a worker, as the gateway sees it: what it has said, and what it was asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from cache.report import CacheStats
from engine.report import EngineStats, StepReport
from gateway.load_progress import ReportProgress
from gateway.replica import ReplicaUnavailable
from gateway.replicas.engine_facts import EngineFacts
from gateway.replicas.worker.connection import Connection
from gateway.replicas.worker.messages import (
    Answer,
    Beat,
    Erase,
    Fatal,
    FromWorker,
    Progress,
    Ready,
    SetShares,
    Step,
    TakeSnapshot,
    ToWorker,
)

Call = Callable[[int], Erase | SetShares | TakeSnapshot]


class Life:
    """Begins with the process and ends once, for one reason, with `lost` set to it.

    `ready` is set when the model is loaded, and cancelled if the life ends before. `on_ready` hears
    of that before any report, `on_step` sees every report, `on_lost` the end; all are called on the
    event loop.
    """

    def __init__(
        self,
        *,
        on_ready: Callable[[EngineFacts], None],
        on_step: Callable[[StepReport], None],
        on_lost: Callable[[str], None],
        progress: ReportProgress,
    ) -> None:
        """`progress` may raise: then the life ends, and the error is what `interrupted` holds."""
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[str] = loop.create_future()
        self.interrupted: BaseException | None = None
        self.fatal: str | None = None
        self._connection: Connection | None = None
        self._on_ready = on_ready
        self._on_step = on_step
        self._on_lost = on_lost
        self._progress = progress
        self._loading: tuple[str, int, int] | None = None
        self._stats: EngineStats | None = None
        self._cache: CacheStats | None = None
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._heard_s = time.monotonic()
        self._stats_s = self._heard_s

    def connect(self, connection: Connection) -> None:
        """Speak through this connection."""
        self._connection = connection

    @property
    def serving(self) -> bool:
        """The model is loaded and the process is there."""
        return self.ready.done() and not self.lost.done()

    @property
    def silent_s(self) -> float:
        """Since the worker last said anything."""
        return time.monotonic() - self._heard_s

    def heard(self) -> None:
        """Count the silence from now on, and the age of what it told of its steps too."""
        self._heard_s = self._stats_s = time.monotonic()

    @property
    def step_age_s(self) -> float:
        """Since its step loop last got on, while it has work; 0 without."""
        stats = self._stats
        if stats is None or not (stats.running or stats.waiting):
            return 0.0
        return self.stats().last_step_age_s

    def stats(self) -> EngineStats:
        """As last told, aged by the time since. Only once it is ready."""
        assert self._stats is not None
        age_s = time.monotonic() - self._stats_s
        return replace(self._stats, last_step_age_s=self._stats.last_step_age_s + age_s)

    def cache_stats(self) -> CacheStats:
        """As last told. Only once it is ready."""
        assert self._cache is not None
        return self._cache

    def send(self, message: ToWorker) -> None:
        """Say it, unless nobody is there to hear."""
        if self._connection is not None:
            self._connection.send(message)

    def say(self, call: Call) -> None:
        """Say what `call` makes of a number, and do not wait for the answer."""
        self.send(call(next(self._numbers)))

    async def writable(self) -> None:
        """Wait until it has read most of what it was told. Raises ReplicaUnavailable if it is lost
        meanwhile."""
        if self._connection is not None:
            await self._connection.writable()
        if self.lost.done():
            raise ReplicaUnavailable("The worker was lost before it took the request.")

    async def ask(self, call: Call) -> Answer:
        """Say what `call` makes of a number, and wait for the answer of that number.

        Raises ReplicaUnavailable if the engine has stopped, or is lost before it answers.
        """
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            if self.lost.done():
                raise ReplicaUnavailable("The worker has stopped.")
            self.send(call(number))
            told: Answer = await answer
        finally:
            del self._calls[number]
        if told.error is not None:
            raise ReplicaUnavailable(f"The worker could not do it: {told.error}")
        return told

    def receive(self, message: FromWorker) -> None:
        """Take in what it says, as long as it counts as alive."""
        if self.lost.done():
            return
        self._heard_s = time.monotonic()
        match message:
            case Step():
                self._take_stats(message.report.stats)
                self._on_step(message.report)
                if not message.report.stats.alive:
                    self.lose("its engine has stopped")
            case Beat():
                if message.stats is not None:
                    self._take_stats(message.stats)
                if message.cache is not None:
                    self._cache = message.cache
                if not self.ready.done() and self._loading is not None:
                    self._say_progress(*self._loading)  # so that whoever waits can change his mind
            case Answer():
                answer = self._calls.get(message.call)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case Progress():
                self._loading = (message.what, message.done, message.total)
                self._say_progress(*self._loading)
            case Ready():
                self._cache = message.cache
                self._take_stats(message.stats)
                if not self.ready.done():
                    self.ready.set_result(None)
                    self._on_ready(message.facts)
            case Fatal():
                self.fatal = message.reason
                self.lose(message.reason)

    def lose(self, reason: str) -> None:
        """It is over: nothing that was asked of it will be answered. Idempotent."""
        if self.lost.done():
            return
        self.lost.set_result(reason)
        self.ready.cancel()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ReplicaUnavailable("The worker was lost before it answered."))
        self._on_lost(reason)

    def _take_stats(self, stats: EngineStats) -> None:
        self._stats = stats
        self._stats_s = time.monotonic()

    def _say_progress(self, what: str, done: int, total: int) -> None:
        try:
            self._progress(what, done, total)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for the model
            self.interrupted = error
            self.lose("loading was interrupted")
