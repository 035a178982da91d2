"""The models of the settings, loaded and running, and closed again when the scope ends."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import structlog

from cache.directory import Directory
from engine.chat_template import ChatTemplate
from engine.errors import EngineError
from gateway.credentials import remote_environ, worker_environ
from gateway.dispatch.member import Routable
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.router import Router
from gateway.dispatch.warmer import Warmer
from gateway.ended_tasks import begin_task, end_task
from gateway.kv_events.vllm_zmq import FollowerStats
from gateway.load_progress import ReportProgress
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.named_cache_store import NamedCacheStore
from gateway.news.fleet_news import FleetNews, LocalNews, OwnLoad
from gateway.news.redis_news import RedisNews, open_news
from gateway.redis_services import RedisServices
from gateway.remote.group import RemoteReplicas
from gateway.remote.model import RemoteModel, make_remote_model
from gateway.remote.replica import RemoteReplica
from gateway.replica import Replica
from gateway.replicas.context import LocalContext
from gateway.replicas.worker.cores import share_cores
from gateway.replicas.worker.messages import CoreShare
from gateway.routing_policies import load_policy
from gateway.settings import ModelSettings, Settings
from gateway.settings_errors import ConfigError
from gateway.settings_fleet import RemoteSettings

if TYPE_CHECKING:
    from gateway.replicas.local import LocalReplicas

_log = structlog.get_logger("forebay.fleet")

ReplicaT = TypeVar("ReplicaT", bound=Routable)

_TOUCH_S = 0.05
_CAUGHT_UP_S = 3.0
_SWEEP_S = 0.1
_SWEEP_BLOCKS = 2_000
"""What is forgotten at once must not hold up the event loop."""


@asynccontextmanager
async def open_fleet(
    settings: Settings,
    *,
    models: Models,
    environ: Mapping[str, str],
    secret: bytes,
    metrics: Metrics,
    progress: ReportProgress,
    redis: RedisServices,
) -> AsyncIterator[Fleet]:
    """Load every model, one after another, and start its replicas.

    `models` is filled. `secret` keys the owners of KV. Loading runs on worker threads, so that
    health is answered meanwhile. Raises ModelLoadError, EngineError or ConfigError, one line each,
    with whatever was opened closed again.
    """
    async with AsyncExitStack() as held:
        directory = Directory()
        context = LocalContext(
            secret,
            redis,
            directory,
            metrics,
            worker_environ(settings, environ),
            _core_shares(settings),
        )
        # what it tells is said goodbye to after the fleet has been closed
        telling = await held.enter_async_context(AsyncExitStack())
        fleet = Fleet(settings, models, context, LocalNews(), remote_environ(settings, environ))
        held.push_async_callback(fleet.close)
        for model in settings.models:
            await fleet.open_model(model, progress)
        # not before there are replicas: what is told of others is passed over
        if redis.url is not None:
            news = await telling.enter_async_context(
                open_news(
                    redis.url,
                    secret,
                    on_routed=lambda name, links: _heard(directory, name, links),
                    tls_ca=settings.redis.tls_ca,
                    cluster=redis.cluster,
                )
            )
            await fleet.share(news)
        metrics.fleet.watch(directory.stats, fleet.news, fleet.followers, fleet.isolation_failures)
        await fleet.probed()
        await fleet.apply(settings)
        for chore in (fleet.keep_tidy(), fleet.keep_in_touch()):
            held.push_async_callback(end_task, begin_task(chore, "fleet"))
        yield fleet


def _heard(directory: Directory, replica: str, links: Sequence[bytes]) -> None:
    directory.note_routed(replica, links, monotonic())


def _core_shares(settings: Settings) -> deque[CoreShare]:
    """One for each worker process of the settings, in the order in which they are opened."""
    local = [model.replicas for model in settings.models if not model.remote]
    workers = [own for own in local if own.kind == "process" for _ in range(own.count)]
    return deque(share_cores([own.threads for own in workers]))


class Fleet:
    """Every model that is served, with its replicas. Implements `FleetControl`."""

    def __init__(
        self,
        settings: Settings,
        models: Models,
        context: LocalContext,
        news: FleetNews,
        environ: Mapping[str, str],
    ) -> None:
        self.named_store: NamedCacheStore = context.redis.named
        self.news = news
        """What is heard of the other gateways, and they of this one."""
        self._environ = environ
        self._remote: dict[str, RemoteReplicas] = {}
        self._settings = settings
        self._models = models
        self._context = context
        self._local: dict[str, LocalReplicas] = {}
        self._warmers: list[Warmer] = []

    @property
    def gateways(self) -> int:
        """How many gateways are alive as far as is known here, this one included."""
        return self.news.gateways

    async def open_model(self, settings: ModelSettings, progress: ReportProgress) -> None:
        """Start the model's replicas and serve it."""
        if settings.remote:
            await self._open_remote(settings)
            return
        # not before it is needed: a gateway of remote models alone has no use for torch
        from gateway.replicas.local import LocalReplicas

        router: Router[Replica] = self._router(settings)
        router.warmer = Warmer(
            settings.name,
            router.find,
            self._context.directory,
            self._context.metrics.dispatch.warmed_up,
            Random(),
        )
        self._warmers.append(router.warmer)
        local = self._local[settings.name] = LocalReplicas(settings, router, self._context)
        await local.open(progress)
        assert local.model is not None
        self._models.add(local.model)

    async def share(self, news: RedisNews) -> None:
        """Tell the other gateways what is sent to servers that all use, and hear of theirs; what
        was told before is waited for, 3 seconds at most, so that the first requests find warm what
        the others have sent where."""
        self.news = news
        if self._remote:
            await news.caught_up(_CAUGHT_UP_S)

    async def probed(self) -> None:
        """Wait until it is known how the servers elsewhere are: for those of all models at once, so
        that many that do not answer hold up a start for no longer than one."""
        await asyncio.gather(*(remote.probed() for remote in self._remote.values()))

    async def apply(self, settings: Settings) -> None:
        """Put to use what a reload may change: tenants' floors and quotas, how many replicas there
        are, the routing policy, aliases and fallbacks.

        What cannot be done is no reason to leave out the rest: it is raised at the end, together.
        """
        self._settings = settings
        self._models.configure(settings.models)
        failures: list[Exception] = []
        # what is quick comes first: replicas may take minutes to load or to drain
        for follow in (self._use_policy, self._set_tenants, self._use_replicas):
            for model in settings.models:
                try:
                    await follow(model)
                except Exception as failure:  # noqa: BLE001 - raised below
                    failures.append(failure)
        if failures:
            raise ExceptionGroup("the fleet could not follow the configuration", failures)

    async def _use_policy(self, model: ModelSettings) -> None:
        name, router = self._settings.routing.policy, self._models[model.name].router
        if router.policy != name:
            router.use_policy(name, load_policy(name))

    async def _set_tenants(self, model: ModelSettings) -> None:
        if (local := self._local.get(model.name)) is not None:
            await local.set_tenants(self._settings.tenants)
        served = self._models[model.name]
        if isinstance(served, RemoteModel):
            served.isolation.expect(self._undivided_tenants())

    def _undivided_tenants(self) -> list[str]:
        """Those all of whose prompts share KV, unless a request says otherwise."""
        return [each.id for each in self._settings.tenants if each.cache.scope == "tenant"]

    async def _use_replicas(self, model: ModelSettings) -> None:
        drain_s = self._settings.server.drain_s
        if (remote := self._remote.get(model.name)) is not None:
            await remote.become(model.remote, drain_s)
        if (local := self._local.get(model.name)) is not None:
            await local.scale(model.replicas.count, drain_s)

    async def add_local(self, model: str) -> str:
        """See `FleetControl.add_local`."""
        local = self._local.get(model)
        if local is None:
            raise ValueError("model is none that engines of this gateway run")
        try:
            return await local.add()
        except EngineError as failure:
            raise ValueError(str(failure)) from failure

    async def add_remote(self, model: str, remote: RemoteSettings) -> str:
        """See `FleetControl.add_remote`."""
        remotes = self._remote.get(model)
        if remotes is None:
            raise ValueError("model is none that remote servers run")
        try:
            return await remotes.add(remote)
        except ConfigError as refusal:
            raise ValueError("; ".join(refusal.messages)) from None

    async def retire(self, replica: str, timeout_s: float) -> None:
        """See `FleetControl.retire`."""
        for model in self._all():
            if model.group.router.find(replica) is not None:
                await model.group.retire(replica, timeout_s)
                return
        raise ValueError("there is no such replica")

    def followers(self) -> dict[str, FollowerStats]:
        """How the servers that tell of their caches are followed, by replica. Any thread."""
        return {
            name: follower.stats()
            for remote in list(self._remote.values())
            for name, follower in list(remote.followers.items())
        }

    def isolation_failures(self) -> dict[str, int]:
        """How often each server elsewhere did not keep a tenant apart. Any thread."""
        return {
            member.name: member.replica.isolation_failures
            for remote in list(self._remote.values())
            for member in remote.group.router.members
        }

    async def keep_tidy(self) -> None:
        """Forget, a little at a time, what replicas that are gone had cached."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._context.directory.sweep(_SWEEP_BLOCKS)

    async def keep_in_touch(self) -> None:
        """Tell the other gateways what this one has put on servers that all use, and hear of
        theirs."""
        while self._remote:
            loads: dict[str, OwnLoad] = {}
            for remote in self._remote.values():
                for member in remote.group.router.members:
                    own = member.load.own()
                    loads[member.name] = OwnLoad(
                        own.pending_tokens, own.waiting, own.running, own.context_tokens
                    )
                remote.note_foreign(self.news)
            self.news.loads(loads)
            await asyncio.sleep(_TOUCH_S)

    async def close(self) -> None:
        """End every replica."""
        self._models.clear()
        await asyncio.gather(*(warmer.close() for warmer in self._warmers))
        await asyncio.gather(*(model.close() for model in self._all()))

    def _all(self) -> list[LocalReplicas | RemoteReplicas]:
        return [*self._local.values(), *self._remote.values()]

    async def _open_remote(self, settings: ModelSettings) -> None:
        router: Router[RemoteReplica] = self._router(settings)
        tokenizer, template = None, None
        if settings.tokenizer is not None:
            from engine.text_side import load_text_side
            from gateway.model_files import model_files

            text = await asyncio.to_thread(
                load_text_side, model_files(settings.tokenizer), name=settings.name
            )
            tokenizer = text.tokenizer
            if text.chat_template is not None:
                template = ChatTemplate(text.chat_template, tokenizer)
        known = "max_context" in settings.model_fields_set
        model = make_remote_model(
            settings.name,
            router,
            self._context.secret,
            int(time.time()),
            tokenizer=tokenizer,
            chat_template=template,
            max_context=settings.max_context if known else None,
        )
        # servers tell at once what they hold
        model.isolation.expect(self._undivided_tenants())
        remotes = self._remote[settings.name] = RemoteReplicas(
            settings.name, router, self._context.directory, self._environ, model.isolation.root_of
        )
        await remotes.open(settings.remote)
        self._models.add(model)

    def _router(self, settings: ModelSettings) -> Router[ReplicaT]:
        name = self._settings.routing.policy
        router: Router[ReplicaT] = Router(
            settings.name, self._context.directory, load_policy(name), name, Random(), self
        )
        self._context.metrics.dispatch.watch(settings.name, lambda: router.members)
        return router

    def decided(self, receipt: Receipt) -> None:
        """See `RouterObserver.decided`."""
        self._context.metrics.dispatch.decided(receipt)

    def began(self, receipt: Receipt) -> None:
        """See `RouterObserver.began`."""
        self._context.metrics.dispatch.began(receipt)

    def routed(self, _model: str, replica: str, links: Sequence[bytes]) -> None:
        """See `RouterObserver.routed`."""
        self.news.routed(replica, links)
