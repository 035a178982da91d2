"""The models of the settings, loaded and running, and closed again when the scope ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import structlog
import torch

from engine.chat_template import ChatTemplate
from engine.engine import Engine, EngineOptions
from engine.executors.base import Executor
from engine.hardware import choose_device, choose_dtype
from engine.loading import bundled_model_path, load_model
from engine.model import Model
from engine.opening import ExecutorOptions, cache_identity, open_executor
from gateway.load_progress import ReportProgress
from gateway.metrics import Metrics
from gateway.replicas.in_process import InProcessReplica, Sink
from gateway.served_model import ServedModel
from gateway.settings import ModelSettings, Settings

_log = structlog.get_logger("forebay.fleet")


@asynccontextmanager
async def open_fleet(
    settings: Settings, *, metrics: Metrics, progress: ReportProgress
) -> AsyncIterator[Mapping[str, ServedModel]]:
    """Load every model, one after another, and start its replica; by name.

    Loading runs on a worker thread, so that health is answered meanwhile. Raises ModelLoadError or
    EngineError, one line each, with whatever was opened closed again.
    """
    async with AsyncExitStack() as held:
        served: dict[str, ServedModel] = {}
        for model in settings.models:
            served[model.name] = await _open(model, metrics, progress, held)
        yield served


async def _open(
    settings: ModelSettings, metrics: Metrics, progress: ReportProgress, held: AsyncExitStack
) -> ServedModel:
    started = time.monotonic()
    model, executor = await asyncio.to_thread(_load, settings, progress)
    held.callback(executor.close)
    step_tokens = _step_tokens(settings, executor.device)
    max_context = min(settings.max_context, model.architecture.max_positions)

    def open_engine(sink: Sink) -> Engine:
        options = EngineOptions(
            max_context=max_context,
            max_running=settings.max_running,
            step_tokens=step_tokens,
        )
        return Engine(executor, model.eos_token_ids, options, sink)

    max_sequences = settings.max_running + settings.max_waiting
    replica = InProcessReplica(
        f"{settings.name}/0",
        open_engine,
        max_open=max_sequences,
        observe=metrics.observe_step,
    )
    held.push_async_callback(replica.close)
    metrics.watch_replica(replica.name, settings.name, replica.stats)
    replica.start()
    _log.info(
        "model loaded",
        model=settings.name,
        executor=executor.name,
        device=str(executor.device),
        dtype=str(executor.dtype).removeprefix("torch."),
        pool_tokens=executor.pages.shape[0] * executor.block_tokens,
        max_context=max_context,
        cache_identity=cache_identity(model, executor).digest().hex()[:16],
        seconds=round(time.monotonic() - started, 2),
    )
    template = model.chat_template
    return ServedModel(
        name=settings.name,
        tokenizer=model.tokenizer,
        chat_template=ChatTemplate(template, model.tokenizer) if template is not None else None,
        max_context=max_context,
        replica=replica,
        fingerprint=model.fingerprint,
        created=int(time.time()),
        generation_defaults=model.generation_defaults,
        max_sequences=max_sequences,
    )


def _load(settings: ModelSettings, progress: ReportProgress) -> tuple[Model, Executor]:
    device = choose_device(settings.device)
    dtype: torch.dtype = choose_dtype(settings.dtype, device)
    path = bundled_model_path() if settings.path == "bundled" else Path(settings.path)
    model = load_model(path, name=settings.name, dtype=dtype, progress=progress)
    executor = open_executor(
        model,
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
    return model, executor


def _step_tokens(settings: ModelSettings, device: torch.device) -> int:
    """A CPU computes 256 rows as efficiently as more, and then running streams pause half as long
    as for 512; a GPU is not filled by so few."""
    if settings.step_tokens is not None:
        return settings.step_tokens
    return max(settings.max_running, 256 if device.type == "cpu" else 2048)
