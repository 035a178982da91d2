"""The models of the settings, loaded and running, and closed again when the scope ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import structlog
import torch

from cache.block_pool import Share
from cache.hashing import owner_tags
from cache.redis_store import RedisStore
from engine.caching import CacheOptions, measure_cost, tiers_opener
from engine.chat_template import ChatTemplate
from engine.engine import Engine, EngineOptions
from engine.executors.base import Executor
from engine.hardware import choose_device, choose_dtype
from engine.loading import bundled_model_path, load_model
from engine.model import Model
from engine.opening import ExecutorOptions, cache_identity, open_executor
from gateway.load_progress import ReportProgress
from gateway.metrics import Metrics
from gateway.named_cache_store import NamedCacheStore
from gateway.redis_services import open_redis
from gateway.replicas.in_process import InProcessReplica, Sink
from gateway.served_model import ServedModel
from gateway.settings import ModelSettings, Settings
from policies.cost import CostModel

_log = structlog.get_logger("forebay.fleet")


@asynccontextmanager
async def open_fleet(
    settings: Settings,
    *,
    environ: Mapping[str, str],
    secret: bytes,
    metrics: Metrics,
    progress: ReportProgress,
) -> AsyncIterator[Fleet]:
    """Bring up Redis, load every model, one after another, and start its replica.

    `secret` keys the owners of KV. Loading runs on a worker thread, so that health is answered
    meanwhile. Raises ModelLoadError, EngineError or ConfigError, one line each, with whatever was
    opened closed again.
    """
    async with AsyncExitStack() as held:
        redis = await held.enter_async_context(open_redis(settings.redis, environ, secret, metrics))
        fleet = Fleet(secret, redis.named)
        for model in settings.models:
            store = redis.kv if model.cache.redis else None
            fleet.add(model, await _open(model, store, metrics, progress, held))
        await fleet.apply(settings)
        yield fleet


class Fleet:
    """Every model that is served, by name."""

    def __init__(self, secret: bytes, named_store: NamedCacheStore) -> None:
        self.models: dict[str, ServedModel] = {}
        self.named_store = named_store
        self._secret = secret
        self._engines: dict[str, Engine] = {}

    def add(self, settings: ModelSettings, opened: tuple[ServedModel, Engine]) -> None:
        """Serve a model."""
        self.models[settings.name], self._engines[settings.name] = opened

    async def apply(self, settings: Settings) -> None:
        """Put the tenants' floors and quotas to use, here and in what a reload brings."""
        for name, engine in self._engines.items():
            block_bytes = self.models[name].kv_block_bytes
            device: dict[bytes, Share] = {}
            dram: dict[bytes, Share] = {}
            redis: dict[bytes, int] = {}
            for tenant in settings.tenants:
                tag, cache = owner_tags(self._secret, tenant.id, None).tenant, tenant.cache
                device[tag] = _share(cache.device_floor, cache.device_quota, block_bytes)
                dram[tag] = _share(cache.dram_floor, cache.dram_quota, block_bytes)
                if cache.redis_quota is not None:
                    redis[tag] = cache.redis_quota
            await asyncio.to_thread(engine.set_shares, device, dram, redis)


def _share(floor_bytes: int, quota_bytes: int | None, block_bytes: int) -> Share:
    quota = None if quota_bytes is None else quota_bytes // block_bytes
    return Share(floor_bytes // block_bytes, quota)


async def _open(
    settings: ModelSettings,
    redis: RedisStore | None,
    metrics: Metrics,
    progress: ReportProgress,
    held: AsyncExitStack,
) -> tuple[ServedModel, Engine]:
    started = time.monotonic()
    model, executor, cost = await asyncio.to_thread(_load, settings, progress)
    held.callback(executor.close)
    step_tokens = _step_tokens(settings, executor.device)
    max_context = _max_context(settings, model)
    identity = cache_identity(model, executor)
    open_cache = tiers_opener(
        cost,
        identity,
        CacheOptions(
            dram_bytes=settings.cache.dram,
            redis=redis,
            write_through=settings.cache.write == "through",
            ahead_tokens=2 * step_tokens,
            max_context=max_context,
        ),
    )
    engines: list[Engine] = []

    def open_engine(sink: Sink) -> Engine:
        options = EngineOptions(
            max_context=max_context,
            max_running=settings.max_running,
            step_tokens=step_tokens,
        )
        engines.append(Engine(executor, model.eos_token_ids, options, sink, open_cache))
        return engines[0]

    max_sequences = settings.max_running + settings.max_waiting
    replica = InProcessReplica(
        f"{settings.name}/0",
        open_engine,
        max_open=max_sequences,
        observe=metrics.observe_step,
    )
    held.push_async_callback(replica.close)
    metrics.watch_replica(replica.name, settings.name, replica.stats)
    metrics.watch_cache(replica.name, settings.name, replica.cache_stats)
    replica.start()
    _log.info(
        "model loaded",
        model=settings.name,
        executor=executor.name,
        device=str(executor.device),
        dtype=str(executor.dtype).removeprefix("torch."),
        pool_tokens=executor.pages.shape[0] * executor.block_tokens,
        max_context=max_context,
        cache_identity=identity.digest().hex()[:16],
        dram_bytes=settings.cache.dram,
        redis=redis is not None,
        seconds=round(time.monotonic() - started, 2),
    )
    template = model.chat_template
    served = ServedModel(
        name=settings.name,
        tokenizer=model.tokenizer,
        chat_template=ChatTemplate(template, model.tokenizer) if template is not None else None,
        max_context=max_context,
        replica=replica,
        fingerprint=model.fingerprint,
        created=int(time.time()),
        generation_defaults=model.generation_defaults,
        max_sequences=max_sequences,
        kv_block_tokens=executor.block_tokens,
        kv_block_bytes=int(executor.pages.shape[1]),
    )
    return served, engines[0]


def _load(settings: ModelSettings, progress: ReportProgress) -> tuple[Model, Executor, CostModel]:
    device = choose_device(settings.device)
    dtype: torch.dtype = choose_dtype(settings.dtype, device)
    path = bundled_model_path() if settings.path == "bundled" else Path(settings.path)
    model = load_model(path, name=settings.name, dtype=dtype, progress=progress)
    parameters = sum(tensor.numel() for tensor in model.weights.values())
    executor = open_executor(
        model.architecture,
        model.weights,
        ExecutorOptions(
            device=device,
            dtype=dtype,
            block_tokens=settings.cache.block_tokens,
            pool_bytes=settings.cache.device,
            threads=settings.replicas.threads,
            step_tokens=_step_tokens(settings, device),
        ),
        say=lambda line: _log.info(line, model=settings.name),
    )
    with ExitStack() as opened:
        opened.callback(executor.close)
        cost = measure_cost(
            executor,
            parameters,
            step_tokens=_step_tokens(settings, device),
            max_context=_max_context(settings, model),
        )
        opened.pop_all()
    return model, executor, cost


def _max_context(settings: ModelSettings, model: Model) -> int:
    return min(settings.max_context, model.architecture.max_positions)


def _step_tokens(settings: ModelSettings, device: torch.device) -> int:
    """A CPU computes 256 rows as efficiently as more, and then running streams pause half as long
    as for 512; a GPU is not filled by so few."""
    if settings.step_tokens is not None:
        return settings.step_tokens
    return max(settings.max_running, 256 if device.type == "cpu" else 2048)
