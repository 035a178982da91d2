"""A replica that is a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from cache.block_events import BlockEvents
from cache.block_pool import Share
from cache.report import CacheStats, Erased
from engine.report import EngineStats, StepReport
from engine.request import EngineRequest
from gateway.dispatch.member import Condition, Health
from gateway.load_progress import ReportProgress
from gateway.replica import ReplicaUnavailable, TokenStream
from gateway.replicas.engine_facts import EngineFacts
from gateway.replicas.inbox import Inbox
from gateway.replicas.worker.life import Life
from gateway.replicas.worker.messages import (
    Abort,
    Erase,
    SetShares,
    Shares,
    Submit,
    TakeSnapshot,
)
from gateway.replicas.worker.supervisor import Audience, Patience, Supervisor
from gateway.replicas.worker.work_order import WorkOrder
from policies.cost import Coefficients

_NOT_THERE = EngineStats(
    waiting=0,
    running=0,
    pages_free=0,
    pages_cached=0,
    pages_held=0,
    pages_total=0,
    preemptions=0,
    steps=0,
    alive=False,
    last_step_age_s=0.0,
)


class WorkerReplica:
    """Carries requests to a worker's process and its steps back, whatever becomes of the process.

    When it is lost, every stream hears of it at once, and the supervisor starts it again. Counters
    in `stats` and `cache_stats` are those of its present life. Implements `Replica`; belongs to one
    event loop, which must run on the thread that started it for as long as the worker is to live.
    """

    def __init__(
        self,
        name: str,
        order: WorkOrder,
        *,
        max_open: int,
        on_ready: Callable[[str, EngineFacts], None],
        observe: Callable[[str, StepReport], None],
        on_health: Callable[[str, Health], None],
        patience: Patience | None = None,
    ) -> None:
        """`max_open` is how many sequences may be here at once, running and waiting.

        `on_ready` hears of every life that begins to serve, before `observe` sees any report of it;
        `on_health` of every change of its condition or of the reason for it. All get the
        replica's name, are called on the event loop, and must not raise.
        """
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._max_open = max_open
        self._on_ready = on_ready
        self._observe = observe
        self._inboxes: dict[str, Inbox] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._cost: Coefficients | None = None
        self._supervisor = Supervisor(
            name,
            order,
            Patience() if patience is None else patience,
            Audience(
                ready=self._begin,
                step=self._deliver,
                lost=self._lose_all,
                health=lambda health: on_health(name, health),
            ),
        )

    async def start(self, progress: ReportProgress) -> EngineFacts:
        """Start the process and wait until it serves; the facts that later lives share.

        Raises ModelLoadError if the model cannot be loaded or the process ends before it is, and
        whatever `progress` raises, which is called on the event loop. Nothing runs then.
        """
        return await self._supervisor.start(progress)

    @asynccontextmanager
    async def submit(self, request: EngineRequest) -> AsyncIterator[TokenStream]:
        """See `Replica.submit`."""
        life = self._serving_life()
        if len(self._inboxes) >= self._max_open:
            raise ReplicaUnavailable("Every place in the engine's queue is taken.", full=True)
        request_id = request.request_id
        inbox = self._inboxes[request_id] = Inbox(self._loop)
        self._empty.clear()
        try:
            await life.writable()
            life.send(Submit(request))
            yield inbox
        finally:
            if self._inboxes.get(request_id) is inbox:
                del self._inboxes[request_id]
            if not self._inboxes:
                self._empty.set()
            if not inbox.ended:
                inbox.end()
                life.send(Abort(request_id))

    def health(self) -> Health:
        """See `Replica.health`."""
        return self._supervisor.health

    def coefficients(self) -> Coefficients:
        """See `Replica.coefficients`. Only once it is started."""
        if self._cost is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._cost

    def stats(self) -> EngineStats:
        """See `Replica.stats`."""
        life = self._supervisor.life
        return _NOT_THERE if life is None else life.stats()

    def cache_stats(self) -> CacheStats:
        """See `Replica.cache_stats`; a quarter of a second old at most, empty without a worker."""
        life = self._supervisor.life
        return CacheStats((), ()) if life is None else life.cache_stats()

    async def erase_cache(self, tenant: bytes, scope: bytes | None) -> Erased:
        """See `Replica.erase_cache`. Raises ReplicaUnavailable without a worker."""
        return await self._erase(tenant, scope)

    async def flush_cache(self) -> Erased:
        """See `Replica.flush_cache`. Raises ReplicaUnavailable without a worker."""
        return await self._erase(None, None)

    async def set_shares(
        self, device: Mapping[bytes, Share], dram: Mapping[bytes, Share], redis: Mapping[bytes, int]
    ) -> None:
        """Put tenants' floors and quotas to use, now and in every life to come; see
        `Engine.set_shares`."""
        shares = self._supervisor.shares = Shares(dict(device), dict(dram), dict(redis))
        life = self._supervisor.life
        if life is None:
            return
        try:
            await life.ask(lambda number: SetShares(number, shares))
        except ReplicaUnavailable:
            if not life.lost.done():
                raise

    async def block_snapshot(self) -> BlockEvents:
        """Everything that its tiers hold, in sequence with the events of its reports. Raises
        ReplicaUnavailable without a worker."""
        answer = await self._life().ask(TakeSnapshot)
        assert answer.events is not None
        return answer.events

    async def drain(self, timeout_s: float) -> None:
        """See `Replica.drain`. A worker that is lost from now on is not started again."""
        self._supervisor.retire()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()

    async def close(self) -> None:
        """Stop the worker, which saves its cache; whoever still waits for tokens gets
        ReplicaUnavailable. Takes at most as long as `Patience` says."""
        await self._supervisor.close()

    def _serving_life(self) -> Life:
        if self._supervisor.retired:
            raise ReplicaUnavailable("The worker is shutting down.", blames_replica=False)
        return self._life()

    def _life(self) -> Life:
        life = self._supervisor.life
        if life is None:
            starting = self._supervisor.health.condition is Condition.STARTING
            state = "still starting" if starting else "down"
            raise ReplicaUnavailable(f"The worker is {state}.", blames_replica=False)
        return life

    async def _erase(self, tenant: bytes | None, scope: bytes | None) -> Erased:
        answer = await self._life().ask(lambda number: Erase(number, tenant, scope))
        assert answer.erased is not None
        return answer.erased

    def _begin(self, facts: EngineFacts) -> None:
        self._cost = facts.cost
        self._on_ready(self.name, facts)

    def _deliver(self, report: StepReport) -> None:
        for output in report.outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.put(output, alive=report.stats.alive)
        if report.cost is not None:
            self._cost = report.cost
        self._observe(self.name, report)

    def _lose_all(self, _reason: str) -> None:
        """A life has ended: its requests are nobody's, and those of the next may have their ids."""
        blames_replica = not self._supervisor.retired
        inboxes, self._inboxes = self._inboxes, {}
        self._empty.set()
        for inbox in inboxes.values():
            inbox.lose(
                "The worker was lost before the answer was complete.", blames_replica=blames_replica
            )
