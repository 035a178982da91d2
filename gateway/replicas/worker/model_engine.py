"""The engine that a worker runs: the model of its settings, its tiers and its way to Redis."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import structlog
import torch

from cache.redis_store import RedisStore
from gateway.load_progress import ReportProgress
from gateway.replicas.engine_opening import Placement, load_engine
from gateway.replicas.step_engine import Sink
from gateway.replicas.worker.child import OpenedEngine
from gateway.replicas.worker.messages import Open
from gateway.settings import ModelSettings

_log = structlog.get_logger("forebay.worker")


@contextmanager
def open_model(order: Open, sink: Sink, progress: ReportProgress) -> Iterator[OpenedEngine]:
    """Load it, and stop and save it at the end. Raises EngineError, one line, for what cannot be
    loaded."""
    started_s = time.monotonic()
    settings = ModelSettings.model_validate_json(order.model)
    with ExitStack() as held:
        redis = None
        if order.redis is not None:
            redis = RedisStore(order.redis)
            held.callback(redis.close)
            redis.start()
        loaded = load_engine(settings, progress, _placement(settings.device, order))
        held.callback(loaded.executor.close)
        engine = loaded.open(sink, redis)
        held.callback(engine.close)
        _log.info(
            "worker loaded",
            model=settings.name,
            threads=order.cores.threads,
            cpus=list(order.cores.cpus) or None,
            seconds=round(time.monotonic() - started_s, 2),
        )
        yield OpenedEngine(engine, loaded.facts)


def _placement(device: str, order: Open) -> Placement:
    """Where it computes: replicas that name no GPU take the machine's in turn."""
    placement = Placement(threads=order.cores.threads)
    if device in ("auto", "cuda") and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        own = order.index % gpus
        # What is allocated without naming a device, such as pinned memory, goes through this one.
        torch.cuda.set_device(own)
        sharers = len(range(own, order.count, gpus))
        placement = replace(placement, device=f"cuda:{own}", sharers=sharers)
    elif device.startswith("cuda:"):
        placement = replace(placement, sharers=order.count)
    return placement
