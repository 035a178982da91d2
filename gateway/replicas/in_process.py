"""A replica that is an engine in this process, on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from cache.block_events import BlockEvents
from cache.block_pool import Share
from cache.report import CacheStats, Erased
from engine.errors import EngineError
from engine.report import EngineStats, StepReport
from engine.request import EngineRequest
from gateway.dispatch.member import Condition, Health
from gateway.replica import ReplicaUnavailable, TokenStream
from gateway.replicas.inbox import Inbox
from gateway.replicas.step_engine import Sink, StepEngine
from policies.cost import Coefficients

HUNG_AFTER_S = 60.0
"""No step takes that long; an engine with work that has not finished one since is stuck."""


class InProcessReplica:
    """Carries requests to the engine's thread, and each step's outcome back in one wake-up.
    Implements `Replica`."""

    def __init__(
        self,
        name: str,
        open_engine: Callable[[Sink], StepEngine],
        *,
        max_open: int,
        cost: Coefficients,
        observe: Callable[[str, StepReport], None],
    ) -> None:
        """Must be made on the event loop that will use it.

        `open_engine` gets the sink that its engine shall call. `max_open` is how many sequences may
        be here at once, running and waiting. `cost` is what work takes until the engine says it.
        `observe` sees every report, on the event loop.
        """
        self.name = name
        self._cost = cost
        self._loop = asyncio.get_running_loop()
        self._max_open = max_open
        self._observe = observe
        self._inboxes: dict[str, Inbox] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._draining = False
        self._engine = open_engine(self._carry)

    def start(self) -> None:
        """Let the engine run."""
        self._engine.start()

    @asynccontextmanager
    async def submit(self, request: EngineRequest) -> AsyncIterator[TokenStream]:
        """See `Replica.submit`."""
        if self._draining:
            raise ReplicaUnavailable("The engine is shutting down.", blames_replica=False)
        if len(self._inboxes) >= self._max_open:
            raise ReplicaUnavailable("Every place in the engine's queue is taken.", full=True)
        request_id = request.request_id
        inbox = self._inboxes[request_id] = Inbox(self._loop)
        self._empty.clear()
        try:
            try:
                self._engine.submit(request)
            except EngineError:
                raise ReplicaUnavailable("The engine has stopped.") from None
            yield inbox
        finally:
            del self._inboxes[request_id]
            if not self._inboxes:
                self._empty.set()
            if not inbox.ended:
                inbox.end()
                self._engine.abort(request_id)

    def health(self) -> Health:
        """See `Replica.health`."""
        if self._draining:
            return Health(Condition.DRAINING, "shutting down", final=True)
        stats = self._engine.stats()
        if not stats.alive:
            return Health(Condition.DOWN, "the engine has stopped", final=True)
        if stats.running and stats.last_step_age_s > HUNG_AFTER_S:
            return Health(Condition.DOWN, "the engine does not finish its step")
        return Health(Condition.SERVING)

    def coefficients(self) -> Coefficients:
        """See `Replica.coefficients`."""
        return self._cost

    def stats(self) -> EngineStats:
        """See `Replica.stats`."""
        return self._engine.stats()

    def cache_stats(self) -> CacheStats:
        """See `Replica.cache_stats`."""
        return self._engine.cache_stats()

    async def erase_cache(self, tenant: bytes, scope: bytes | None) -> Erased:
        """See `Replica.erase_cache`."""
        return await self._erase(tenant, scope)

    async def flush_cache(self) -> Erased:
        """See `Replica.flush_cache`."""
        return await self._erase(None, None)

    async def _erase(self, tenant: bytes | None, scope: bytes | None) -> Erased:
        try:
            return await asyncio.to_thread(self._engine.erase_cache, tenant, scope)
        except EngineError:
            raise ReplicaUnavailable("The engine has stopped.") from None

    async def set_shares(
        self, device: Mapping[bytes, Share], dram: Mapping[bytes, Share], redis: Mapping[bytes, int]
    ) -> None:
        """See `Replica.set_shares`."""
        await asyncio.to_thread(self._engine.set_shares, device, dram, redis)

    async def block_snapshot(self) -> BlockEvents:
        """See `Replica.block_snapshot`."""
        try:
            return await asyncio.to_thread(self._engine.block_snapshot)
        except EngineError:
            raise ReplicaUnavailable("The engine has stopped.") from None

    async def drain(self, timeout_s: float) -> None:
        """See `Replica.drain`."""
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()

    async def close(self) -> None:
        """Stop the engine; whoever still waits for tokens gets ReplicaUnavailable."""
        self._draining = True
        await asyncio.to_thread(self._engine.close)

    def _carry(self, report: StepReport) -> None:
        """The engine's sink, called on its thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
            self._loop.call_soon_threadsafe(self._deliver, report)

    def _deliver(self, report: StepReport) -> None:
        for output in report.outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.put(output, alive=report.stats.alive)
        if report.cost is not None:
            self._cost = report.cost
        self._observe(self.name, report)
