"""Keeps one worker running: starts it, watches it, ends it when it hangs, starts it again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import structlog

from engine.errors import ModelLoadError
from engine.report import StepReport
from gateway.dispatch.member import Condition, Health
from gateway.load_progress import ReportProgress
from gateway.replicas.engine_facts import EngineFacts
from gateway.replicas.worker.life import Life
from gateway.replicas.worker.messages import SetShares, Shares, Stop
from gateway.replicas.worker.process import WorkerProcess, running_worker
from gateway.replicas.worker.work_order import WorkOrder

_log = structlog.get_logger("forebay.worker")

T = TypeVar("T")

_LOOKS_PER_HANG = 8
_EXIT_S = 1.0
"""How long a worker whose socket is closed may take to have ended."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a supervisor waits, in seconds.

    `hang_s` is how long a worker that serves may be silent, `opening_s` one that loads, which
    importing libraries can keep from speaking. `step_s` is how long its step loop may be at one
    step. `stop_s` is given to one that was told to stop, mostly for saving its cache, and then
    `terminate_s` before it is killed. One that was lost is started again after `first_retry_s`, and
    after twice as long each time up to `last_retry_s`, unless it had served for `settled_s`.
    """

    hang_s: float = 5.0
    opening_s: float = 120.0
    step_s: float = 60.0
    stop_s: float = 15.0
    terminate_s: float = 2.0
    first_retry_s: float = 0.5
    last_retry_s: float = 30.0
    settled_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Audience:
    """Who hears of a worker, on the event loop: `ready` when a life begins to serve, before any of
    its reports, `step` of every report, `lost` at the end of each life, with the reason, `health`
    of every change of its condition or of the reason for it."""

    ready: Callable[[EngineFacts], None]
    step: Callable[[StepReport], None]
    lost: Callable[[str], None]
    health: Callable[[Health], None]


class Supervisor:
    """One life after another, each by a process of its own, until it is closed.

    `shares` is what the lives to come begin with.
    """

    def __init__(self, name: str, order: WorkOrder, patience: Patience, audience: Audience) -> None:
        self.shares: Shares | None = None
        self.health = Health(Condition.STARTING)
        self._name = name
        self._order = order
        self._patience = patience
        self._audience = audience
        self._life: Life | None = None
        self._retired = asyncio.Event()
        self._closing = asyncio.Event()
        self._first: asyncio.Future[EngineFacts] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    @property
    def life(self) -> Life | None:
        """The one that serves now, if there is one."""
        life = self._life
        return life if life is not None and life.serving else None

    @property
    def retired(self) -> bool:
        """No life will follow this one, which ends because it was told to."""
        return self._retired.is_set()

    async def start(self, progress: ReportProgress) -> EngineFacts:
        """Start the first life and wait until it serves. `progress` is called on the event loop.

        Raises ModelLoadError if that life ends before, and whatever `progress` raises; another is
        not tried then.
        """
        self._task = asyncio.create_task(self._supervise(progress))
        try:
            return await self._first
        except BaseException:
            await self.close()
            raise

    def retire(self) -> None:
        """Let no other life follow this one."""
        self._retired.set()
        if self.health.condition is Condition.SERVING:
            self._become(Condition.DRAINING, "shutting down")

    async def close(self) -> None:
        """Stop the worker, by force if it does not end by itself, and wait for that. Idempotent."""
        self.retire()
        self._closing.set()
        if self._task is not None:
            # it goes on, and ends the process, also if whoever waits here is cancelled
            await asyncio.wait([self._task])

    async def _supervise(self, progress: ReportProgress) -> None:
        retry_s = self._patience.first_retry_s
        try:
            while True:
                end = await self._live_and_tell(progress)
                if not self._first.done():
                    self._first.set_exception(end.error)
                    return
                if self._closing.is_set():
                    return
                if end.served_s >= self._patience.settled_s:
                    retry_s = self._patience.first_retry_s
                _log.warning(
                    "worker lost",
                    replica=self._name,
                    reason=end.reason,
                    again_in_s=None if self.retired else retry_s,
                )
                if await _happens(self._retired, retry_s):
                    return
                retry_s = min(2 * retry_s, self._patience.last_retry_s)
                progress = _to_nobody
        finally:
            self._become(Condition.DOWN, self.health.reason)

    async def _live_and_tell(self, progress: ReportProgress) -> _End:
        """One life; whatever goes wrong with it, another may go well."""
        try:
            end = await self._live(progress)
        except Exception as error:  # noqa: BLE001 - logged, and told to whoever waits
            _log.exception("a worker cannot be run", replica=self._name)
            end = _End(0.0, f"it cannot be run: {type(error).__name__}", error)
        self._become(Condition.DOWN, end.reason)
        return end

    async def _live(self, progress: ReportProgress) -> _End:
        """One life, from starting its process to having buried it."""
        self._become(Condition.STARTING)
        shares = self.shares
        life = self._life = Life(
            on_ready=lambda facts: self._serve(life, facts, shares),
            on_step=self._audience.step,
            on_lost=self._lost,
            progress=progress,
        )
        served_s = 0.0
        async with (
            running_worker(
                self._name,
                self._order.environ,
                receive=life.receive,
                lost=life.lose,
                program=self._order.program,
            ) as process,
            self._watching(life, process),
            _task(self._closing.wait()) as closing,
        ):
            life.connect(process.connection)
            life.send(self._order.message(self._name, shares))
            await _first_of(life.ready, life.lost, closing)
            if life.serving:
                began_s = time.monotonic()
                await _first_of(life.lost, closing)
                served_s = time.monotonic() - began_s
                if self._closing.is_set():
                    await self._stop(life, process)
            if life.lost.done():
                how = await process.ended(_EXIT_S)
                reason = life.lost.result() + (f" ({how})" if how else "")
            else:
                reason = "told to stop"
        error = life.interrupted or ModelLoadError(
            life.fatal or f"{self._name}: the worker was lost while it was loading: {reason}"
        )
        return _End(served_s, reason, error)

    def _serve(self, life: Life, facts: EngineFacts, shares: Shares | None) -> None:
        """The model is loaded, with `shares` put to use."""
        if self.shares is not None and self.shares is not shares:  # changed in the meantime
            changed = self.shares
            life.say(lambda number: SetShares(number, changed))
        self._audience.ready(facts)
        if self.retired:
            self._become(Condition.DRAINING, "shutting down")
        else:
            self._become(Condition.SERVING)
        if not self._first.done():
            self._first.set_result(facts)

    async def _stop(self, life: Life, process: WorkerProcess) -> None:
        """Let it save what it has. What still runs afterwards is killed with its scope."""
        life.send(Stop())
        if await process.ended(self._patience.stop_s) is None:
            _log.warning("the worker does not stop, terminating it", replica=self._name)
            process.terminate()
            await process.ended(self._patience.terminate_s)

    def _lost(self, reason: str) -> None:
        """At once, however long the process may take to be gone."""
        self._become(Condition.DOWN, reason)
        self._audience.lost(reason)

    @asynccontextmanager
    async def _watching(self, life: Life, process: WorkerProcess) -> AsyncIterator[None]:
        async def watch() -> None:
            reason = await self._hangs(life)
            life.lose(reason)
            process.kill()

        async with _task(watch()):
            yield

    async def _hangs(self, life: Life) -> str:
        """Returns when the worker hangs, with what shows it."""
        look_s = self._patience.hang_s / _LOOKS_PER_HANG
        while True:
            slept_s = -time.monotonic()
            await asyncio.sleep(look_s)
            slept_s += time.monotonic()
            if slept_s > 2 * look_s:
                life.heard()  # it was this process that stood still: what it said is unread yet
            limit_s = self._patience.hang_s if life.serving else self._patience.opening_s
            if life.silent_s > limit_s:
                return f"it has given no sign of life for {life.silent_s:.1f} s"
            if life.step_age_s > self._patience.step_s:
                return f"it has been at one step for {life.step_age_s:.1f} s"

    def _become(self, condition: Condition, reason: str = "") -> None:
        final = self.retired and condition in (Condition.DRAINING, Condition.DOWN)
        if final and condition is Condition.DOWN:
            reason = "stopped"
        health = Health(condition, reason, final)
        if health != self.health or condition is Condition.STARTING:
            self.health = health
            self._audience.health(health)


class _End(NamedTuple):
    """How long a life served, why it ended, and what that is to somebody who waits for it."""

    served_s: float
    reason: str
    error: BaseException


@asynccontextmanager
async def _task(coroutine: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Runs beside the scope, and no longer."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _happens(event: asyncio.Event, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _to_nobody(_what: str, _done: int, _total: int) -> None:
    """Only the first life's loading is waited for by somebody."""
