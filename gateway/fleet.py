"""The models of the settings, loaded and running, and closed again when the scope ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import structlog

from cache.directory import Directory
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.router import Router
from gateway.load_progress import ReportProgress, no_progress
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.named_cache_store import NamedCacheStore
from gateway.redis_services import open_redis
from gateway.replica import Replica
from gateway.replicas.local import LocalContext, LocalReplicas
from gateway.routing_policies import load_policy
from gateway.settings import ModelSettings, Settings
from gateway.settings_fleet import RemoteSettings

_log = structlog.get_logger("forebay.fleet")

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
) -> AsyncIterator[Fleet]:
    """Bring up Redis, load every model, one after another, and start its replicas.

    `models` is filled. `secret` keys the owners of KV. Loading runs on worker threads, so that
    health is answered meanwhile. Raises ModelLoadError, EngineError or ConfigError, one line each,
    with whatever was opened closed again.
    """
    async with AsyncExitStack() as held:
        redis = await held.enter_async_context(open_redis(settings.redis, environ, secret, metrics))
        context = LocalContext(secret, redis, Directory(), metrics)
        fleet = Fleet(settings, models, context)
        held.push_async_callback(fleet.close)
        for model in settings.models:
            await fleet.open_model(model, progress)
        await fleet.apply(settings)
        sweeping = asyncio.create_task(fleet.keep_tidy())
        held.callback(sweeping.cancel)
        yield fleet


class Fleet:
    """Every model that is served, with its replicas. Implements `FleetControl`."""

    def __init__(self, settings: Settings, models: Models, context: LocalContext) -> None:
        self.named_store: NamedCacheStore = context.redis.named
        self._settings = settings
        self._models = models
        self._context = context
        self._local: dict[str, LocalReplicas] = {}

    async def open_model(self, settings: ModelSettings, progress: ReportProgress) -> None:
        """Start the model's replicas and serve it."""
        router: Router[Replica] = self._router(settings)
        local = self._local[settings.name] = LocalReplicas(settings, router, self._context)
        await local.open(progress)
        assert local.model is not None
        self._models.add(local.model)

    async def apply(self, settings: Settings) -> None:
        """Put to use what a reload may change: tenants' floors and quotas, how many replicas there
        are, the routing policy, aliases and fallbacks."""
        before, self._settings = self._settings, settings
        self._models.configure(settings.models)
        for model in settings.models:
            if settings.routing.policy != before.routing.policy:
                policy = load_policy(settings.routing.policy)
                self._models[model.name].router.use_policy(settings.routing.policy, policy)
            if (local := self._local.get(model.name)) is not None:
                await local.set_tenants(settings.tenants)
                await local.scale(model.replicas.count, settings.server.drain_s)

    async def add_local(self, model: str) -> str:
        """See `FleetControl.add_local`."""
        local = self._local.get(model)
        if local is None:
            raise ValueError("model is none that engines of this gateway run")
        return await local.add(no_progress)

    async def add_remote(self, model: str, remote: RemoteSettings) -> str:
        """See `FleetControl.add_remote`."""
        raise ValueError("model is none that remote servers run")

    async def retire(self, replica: str, timeout_s: float) -> None:
        """See `FleetControl.retire`."""
        for local in self._local.values():
            if local.group.router.find(replica) is not None:
                await local.group.retire(replica, timeout_s)
                return
        raise ValueError("there is no such replica")

    async def keep_tidy(self) -> None:
        """Forget, a little at a time, what replicas that are gone had cached."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._context.directory.sweep(_SWEEP_BLOCKS)

    async def close(self) -> None:
        """End every replica."""
        self._models.clear()
        await asyncio.gather(*(local.close() for local in self._local.values()))

    def _router(self, settings: ModelSettings) -> Router[Replica]:
        name = self._settings.routing.policy
        router: Router[Replica] = Router(
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

    def routed(self, model: str, replica: str, links: Sequence[bytes]) -> None:
        """See `RouterObserver.routed`."""
