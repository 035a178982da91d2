"""From a model's settings to an engine that can be started, in whichever process it is to run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import structlog
import torch

from cache.identity import CacheIdentity
from cache.redis_store import RedisStore
from engine.caching import CacheOptions, measure_cost, tiers_opener
from engine.engine import Engine, EngineOptions
from engine.executors.base import Executor
from engine.hardware import choose_device, choose_dtype, choose_threads, memory_bytes
from engine.loading import load_model
from engine.model import Model
from engine.opening import ExecutorOptions, cache_identity, open_executor
from engine.peaks import measure_peaks
from engine.report import StepReport
from engine.step_work import ModelWork
from gateway.load_progress import ReportProgress
from gateway.model_files import model_files
from gateway.replicas.engine_facts import EngineFacts
from gateway.settings import ModelSettings
from policies.cost import CostModel

_log = structlog.get_logger("forebay.fleet")

_SHARED_DEVICE = 0.85
"""Of a GPU's memory, what the engines that share it may fill with weights and pages."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an engine computes, if not where its settings say. `threads` None: as the settings say.
    `sharers` is how many engines have the same GPU, this one included: with several, pages are cut
    from its memory in equal parts, so that whoever loads first leaves room for the others."""

    device: str | None = None
    threads: int | None = None
    sharers: int = 1


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, with an executor that is this one's to close until `open` was called."""

    model: Model
    executor: Executor
    facts: EngineFacts
    _settings: ModelSettings
    _cost: CostModel = field(repr=False)
    _identity: CacheIdentity

    def open(self, sink: Callable[[StepReport], None], redis: RedisStore | None) -> Engine:
        """The engine, not started yet; closing it closes the executor too.

        Raises EngineError if the pool is too small for one sequence, ModelLoadError if the DRAM
        budget cannot be had.
        """
        settings, facts = self._settings, self.facts
        open_cache = tiers_opener(
            self._cost,
            self._identity,
            CacheOptions(
                dram_bytes=settings.cache.dram,
                redis=redis,
                write_through=settings.cache.write == "through",
                ahead_tokens=2 * facts.step_tokens,
                max_context=facts.max_context,
            ),
        )
        options = EngineOptions(
            max_context=facts.max_context,
            max_running=settings.max_running,
            step_tokens=facts.step_tokens,
            batching=settings.batching.policy,
        )
        work = ModelWork.of(
            self.model.architecture, self.executor.dtype.itemsize, facts.block_tokens
        )
        return Engine(self.executor, self.model.eos_token_ids, options, sink, open_cache, work)


def load_engine(
    settings: ModelSettings, progress: ReportProgress, placement: Placement = Placement()
) -> LoadedModel:
    """Read the model, open its executor and measure what its steps cost and what the
    device can do; blocks for seconds.

    `progress` is called on this thread. Raises ModelLoadError, and whatever `progress` raises, with
    nothing left open.
    """
    if settings.path is None:
        raise ValueError("a remote model has no engine of ours")
    device = choose_device(settings.device if placement.device is None else placement.device)
    dtype = choose_dtype(settings.dtype, device)
    model = load_model(
        model_files(settings.path), name=settings.name, dtype=dtype, progress=progress
    )
    parameters = sum(tensor.numel() for tensor in model.weights.values())
    step_tokens = _step_tokens(settings, device)
    max_context = min(settings.max_context, model.architecture.max_positions)
    threads = settings.replicas.threads
    if threads is None:
        threads = placement.threads
    executor = open_executor(
        model.architecture,
        model.weights,
        ExecutorOptions(
            device=device,
            dtype=dtype,
            block_tokens=settings.cache.block_tokens,
            pool_bytes=_pool_bytes(settings, device, model, placement.sharers),
            threads=threads,
            step_tokens=step_tokens,
        ),
        say=lambda line: _log.info(line, model=settings.name),
    )
    with ExitStack() as opened:
        opened.callback(executor.close)
        cost = measure_cost(executor, parameters, step_tokens=step_tokens, max_context=max_context)
        peaks = measure_peaks(executor, choose_threads(threads))
        opened.pop_all()
    identity = cache_identity(model, executor)
    facts = EngineFacts(
        executor=executor.name,
        device=str(executor.device),
        dtype=str(executor.dtype).removeprefix("torch."),
        fingerprint=model.fingerprint,
        cache_identity=identity.digest(),
        generation_defaults=dict(model.generation_defaults),
        max_context=max_context,
        step_tokens=step_tokens,
        block_tokens=executor.block_tokens,
        block_bytes=int(executor.pages.shape[1]),
        blocks=int(executor.pages.shape[0]),
        cost=cost.coefficients(step_tokens, executor.block_tokens),
        peaks=peaks,
    )
    return LoadedModel(model, executor, facts, settings, cost, identity)


def _pool_bytes(
    settings: ModelSettings, device: torch.device, model: Model, sharers: int
) -> int | None:
    """The pages' memory where the executor cannot tell by itself how much is to be had."""
    if settings.cache.device is not None or sharers == 1 or device.type != "cuda":
        return settings.cache.device
    weights = sum(tensor.nbytes for tensor in model.weights.values())
    free, _ = torch.cuda.mem_get_info(device)
    fair = int(_SHARED_DEVICE * memory_bytes(device) / sharers) - weights
    return max(1, min(fair, int(_SHARED_DEVICE * (free - weights))))


def _step_tokens(settings: ModelSettings, device: torch.device) -> int:
    """A CPU computes 256 rows as efficiently as more, and then running streams pause half as long
    as for 512; a GPU is not filled by so few."""
    if settings.step_tokens is not None:
        return settings.step_tokens
    return max(settings.max_running, 256 if device.type == "cpu" else 2048)
