"""A model's replicas that are engines of ours, in this process or in processes of their own."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from cache.block_pool import Share
from cache.hashing import owner_tags
from cache.redis_store import RedisStore
from engine.chat_template import ChatTemplate
from engine.errors import EngineError
from engine.report import StepReport
from engine.text_side import TextSide, load_text_side
from engine.tokenizer import Tokenizer
from gateway.dispatch.member import Condition, Health, Member
from gateway.dispatch.router import Router
from gateway.load_progress import ReportProgress
from gateway.model_files import model_files
from gateway.replica import Replica, ReplicaUnavailable
from gateway.replica_group import ReplicaGroup
from gateway.replicas.context import LocalContext
from gateway.replicas.engine_facts import EngineFacts
from gateway.replicas.in_process import InProcessReplica
from gateway.replicas.worker.replica import WorkerReplica
from gateway.replicas.worker.supervisor import Patience
from gateway.replicas.worker.work_order import WorkOrder
from gateway.served_model import ServedModel
from gateway.settings import ModelSettings
from gateway.settings_tenants import TenantSettings

if TYPE_CHECKING:
    from gateway.replicas.engine_opening import LoadedModel

_log = structlog.get_logger("forebay.fleet")


@dataclass(frozen=True, slots=True)
class Opened:
    """A replica that runs, and what was learned when it was opened. `template` is the source of the
    chat template, None where the model has none."""

    replica: Replica
    facts: EngineFacts
    tokenizer: Tokenizer
    template: str | None


class LocalReplicas:
    """Opens and closes the replicas of one model as many as are wanted."""

    def __init__(
        self, settings: ModelSettings, router: Router[Replica], context: LocalContext
    ) -> None:
        self.group: ReplicaGroup[Replica] = ReplicaGroup(router)
        self.model: ServedModel | None = None
        """There once `open` has returned."""
        self._settings = settings
        self._context = context
        self._wanted = settings.replicas.count
        self._closing = False
        self._tenants: Sequence[TenantSettings] = ()
        self._facts: dict[str, EngineFacts] = {}
        self._resyncs: dict[str, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()

    async def open(self, progress: ReportProgress) -> None:
        """Start as many as the settings say; `model` is there after that. Raises ModelLoadError or
        EngineError, with nothing left open once `close` was called."""
        for _ in range(self._settings.replicas.count):
            await self.add(progress)

    async def add(self, progress: ReportProgress | None = None) -> str:
        """One more replica; returns its name: the first number that none has, so that one that is
        replaced leaves its GPU and its series of metrics to the new one. Raises as `open`, whatever
        `progress` raises, and ValueError once `close` was called."""
        async with self._one_at_a_time:
            number = self._free_number()
            name = self._name(number)
            async with AsyncExitStack() as held:
                opened = await self._open(number, progress or self._while_open, held)
                if self.model is None:
                    self.model = await self._served(opened)
                told = None
                while told is not self._tenants:  # a reload may come meanwhile
                    told = self._tenants
                    await opened.replica.set_shares(*self._shares(opened.facts))
                self.group.hold(self._member(opened), held, tells_events=True)
                self._note_pages(name, opened.facts.blocks, opened.facts.blocks)
            return name

    async def scale(self, count: int, drain_s: float) -> None:
        """Start replicas, or retire the youngest, until there are `count`. Without effect if that
        is what was wanted before: the operator may have added or removed some since."""
        if count == self._wanted:
            return
        names = [member.name for member in self.group.router.members if not member.draining]
        # all at once: what is cut off at one must not move to another that is to go as well
        await asyncio.gather(*(self.group.retire(name, drain_s) for name in names[count:]))
        for _ in range(count - len(names)):
            await self.add()
        self._wanted = count

    async def set_tenants(self, tenants: Sequence[TenantSettings]) -> None:
        """Put their floors and quotas to use, in every replica and in those to come."""
        self._tenants = tenants
        for member in self.group.router.members:
            if (facts := self._facts.get(member.name)) is None:
                continue
            try:
                await member.replica.set_shares(*self._shares(facts))
            except (EngineError, ReplicaUnavailable):
                if member.replica.health().condition is Condition.SERVING:
                    raise  # one that is down has no use for them, or is told in its next life

    async def close(self) -> None:
        """End all of them. One that is being started gives up, soon."""
        self._closing = True
        await self.group.close()

    def _while_open(self, _what: str, _done: int, _total: int) -> None:
        if self._closing:
            raise ValueError("the gateway is shutting down")

    def _free_number(self) -> int:
        find = self.group.router.find
        return next(n for n in itertools.count() if find(self._name(n)) is None)

    def _name(self, number: int) -> str:
        return f"{self._settings.name}/{number}"

    async def _open(self, number: int, progress: ReportProgress, held: AsyncExitStack) -> Opened:
        started_s, name = monotonic(), self._name(number)
        if self._settings.replicas.kind == "process":
            opened = await self._open_worker(number, progress, held)
        else:
            opened = await self._open_in_process(name, progress, held)
        facts = self._facts[name] = opened.facts
        held.callback(self._facts.pop, name)
        _log.info(
            "model loaded",
            model=self._settings.name,
            replica=name,
            executor=facts.executor,
            device=facts.device,
            dtype=facts.dtype,
            pool_tokens=facts.pool_tokens,
            max_context=facts.max_context,
            cache_identity=facts.cache_identity.hex()[:16],
            dram_bytes=self._settings.cache.dram,
            redis=self._redis is not None,
            seconds=round(monotonic() - started_s, 2),
        )
        return opened

    async def _open_in_process(
        self, name: str, progress: ReportProgress, held: AsyncExitStack
    ) -> Opened:
        loaded = await asyncio.to_thread(self._load, progress)
        held.callback(loaded.executor.close)
        self._join(name, loaded.facts)
        held.callback(self._context.directory.leave, name)
        replica = InProcessReplica(
            name,
            lambda sink: loaded.open(sink, self._redis),
            max_open=self._max_sequences,
            cost=loaded.facts.cost,
            observe=self._observe,
        )
        held.push_async_callback(replica.close)
        self._watch(replica, loaded.facts, held)
        replica.start()
        template = loaded.model.chat_template
        return Opened(replica, loaded.facts, loaded.model.tokenizer, template)

    async def _open_worker(
        self, number: int, progress: ReportProgress, held: AsyncExitStack
    ) -> Opened:
        settings, context, name = self._settings, self._context, self._name(number)
        text = await asyncio.to_thread(self._text_side)
        order = WorkOrder(
            model=settings,
            cores=held.enter_context(context.core_share(settings)),
            environ=context.worker_environ,
            redis=context.redis.kv_options if settings.cache.redis else None,
            index=number,
            count=max(number + 1, settings.replicas.count),
        )
        replica = WorkerReplica(
            name,
            order,
            max_open=self._max_sequences,
            on_ready=self._begin_life,
            observe=self._observe,
            on_health=self._note_health,
            patience=Patience(hang_s=settings.replicas.hang_s),
        )
        held.push_async_callback(replica.close)
        held.callback(context.directory.leave, name)
        facts = await replica.start(progress)
        self._watch(replica, facts, held)
        return Opened(replica, facts, text.tokenizer, text.chat_template)

    def _begin_life(self, name: str, facts: EngineFacts) -> None:
        """A worker serves, for the first time or again; it holds nothing that it has not told."""
        self._context.directory.leave(name)
        self._join(name, facts)
        self._note_pages(name, facts.blocks, facts.blocks)
        self._context.metrics.utilization.measured(name, facts.peaks)

    def _note_health(self, name: str, health: Health) -> None:
        if health.condition in (Condition.DOWN, Condition.STARTING):
            # at once: what a dead worker had cached must draw nobody to its next life
            self._context.directory.leave(name)
        self.group.router.changed()

    def _load(self, progress: ReportProgress) -> LoadedModel:
        # imports torch, for which a gateway whose engines are elsewhere has no use
        from gateway.replicas.engine_opening import load_engine

        return load_engine(self._settings, progress)

    def _text_side(self) -> TextSide:
        path = self._settings.path
        assert path is not None
        return load_text_side(model_files(path), name=self._settings.name)

    def _join(self, name: str, facts: EngineFacts) -> None:
        """Before the replica can tell what it holds."""
        shares_redis = None if self._redis is None else facts.cache_identity.hex()
        self._context.directory.join(
            name, block_tokens=facts.block_tokens, shares_redis=shares_redis
        )

    def _watch(self, replica: Replica, facts: EngineFacts, held: AsyncExitStack) -> None:
        metrics, model = self._context.metrics, self._settings.name
        metrics.watch_replica(replica.name, model, replica.stats)
        metrics.watch_cache(replica.name, model, replica.cache_stats)
        metrics.utilization.watch(replica.name, facts.peaks)
        held.callback(metrics.forget_replica, replica.name)

    def _observe(self, name: str, report: StepReport) -> None:
        self._context.metrics.observe_step(name, report)
        self._note_pages(name, report.stats.pages_free, report.stats.pages_total)
        if report.events is not None and not self._context.directory.apply(name, report.events):
            self._resync(name)

    def _note_pages(self, name: str, free: int, total: int) -> None:
        if (member := self.group.router.find(name)) is not None:
            member.load.note_pages(free, total)

    def _resync(self, name: str) -> None:
        """Batches were missed: ask for everything, unless it has been asked for already."""
        if name in self._resyncs:
            return
        task = self._resyncs[name] = asyncio.ensure_future(self._ask_for_snapshot(name))
        task.add_done_callback(lambda _: self._resyncs.pop(name, None))

    async def _ask_for_snapshot(self, name: str) -> None:
        member = self.group.router.find(name)
        if member is None:
            return
        try:
            snapshot = await member.replica.block_snapshot()
        except ReplicaUnavailable:
            return  # its next life begins with one
        self._context.directory.apply(name, snapshot)

    def _member(self, opened: Opened) -> Member[Replica]:
        return Member(
            opened.replica,
            self._settings.replicas.kind,
            max_running=self._settings.max_running,
            capacity=self._max_sequences,
            block_tokens=opened.facts.block_tokens,
            clock=monotonic,
        )

    @property
    def _max_sequences(self) -> int:
        return self._settings.max_running + self._settings.max_waiting

    @property
    def _redis(self) -> RedisStore | None:
        return self._context.redis.kv if self._settings.cache.redis else None

    async def _served(self, opened: Opened) -> ServedModel:
        facts, source = opened.facts, opened.template
        template = None if source is None else ChatTemplate(source, opened.tokenizer)
        return ServedModel(
            name=self._settings.name,
            tokenizer=opened.tokenizer,
            chat_template=template,
            max_context=facts.max_context,
            router=self.group.router,
            fingerprint=facts.fingerprint,
            created=int(time.time()),
            generation_defaults=facts.generation_defaults,
            max_sequences=self._max_sequences,
            kv_block_tokens=facts.block_tokens,
            kv_block_bytes=facts.block_bytes,
        )

    def _shares(
        self, facts: EngineFacts
    ) -> tuple[dict[bytes, Share], dict[bytes, Share], dict[bytes, int]]:
        """The tenants' floors and quotas in blocks of this size, in Redis in bytes."""
        device: dict[bytes, Share] = {}
        dram: dict[bytes, Share] = {}
        redis: dict[bytes, int] = {}
        for tenant in self._tenants:
            tag = owner_tags(self._context.secret, tenant.id, None).tenant
            cache = tenant.cache
            device[tag] = _share(cache.device_floor, cache.device_quota, facts.block_bytes)
            dram[tag] = _share(cache.dram_floor, cache.dram_quota, facts.block_bytes)
            if cache.redis_quota is not None:
                redis[tag] = cache.redis_quota
        return device, dram, redis


def _share(floor_bytes: int, quota_bytes: int | None, block_bytes: int) -> Share:
    quota = None if quota_bytes is None else quota_bytes // block_bytes
    return Share(floor_bytes // block_bytes, quota)
