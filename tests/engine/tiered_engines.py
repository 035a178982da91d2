"""Engines over real tiers: tiny float32 models, a real copier, a real Redis.

A tiny model computes faster than any tier answers. So moving a block is made to look cheaper than
computing it, always: what is tested is that it makes no difference to the text.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from cache.block import BlockKey, Owner, Tier
from cache.hashing import chain_root, owner_tags, shared_root
from cache.identity import CacheIdentity
from cache.redis_store import RedisStore
from cache.report import CacheUse, TierStats
from cache.tiered_cache import TieredCache
from cache.tiers import Tiers
from engine import caching
from engine.caching import CacheOptions, measure_cost, tiers_opener
from engine.decoder import build_program
from engine.engine import Engine, EngineOptions
from engine.executors.base import Executor
from engine.executors.native import NativeExecutor, NativeUnavailable
from engine.executors.torch_executor import TorchExecutor
from engine.report import StepReport
from engine.request import EngineRequest, FinishReason, SharedPrefix
from engine.sequence import Sequence as EngineSequence
from policies.cost import CostModel, StepShape
from tests.engine.harness import Collector, request
from tests.engine.native_models import VOCAB, architecture, random_weights

SECRET = b"the server's secret"
MAX_CONTEXT = 288
STEP_TOKENS = 64
MAX_RUNNING = 6
TENANTS = ("acme", "beta", "core")


class ConstantCost(CostModel):
    """Says for ever that computing takes a second a token, so that loads always win and their
    deadlines are far; learns nothing."""

    def prefill_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        return float(max(0, uncached_tokens))

    def saving_s(self, start_token: int, block_tokens: int) -> float:
        return float(block_tokens)

    def observe_step(self, shape: StepShape, seconds: float) -> None:
        """The tiny model's real speed is no matter."""

    def observe_load(self, tier: str, blocks: int, seconds: float) -> None:
        """Nor are the tiers'."""


class FickleCost(ConstantCost):
    """Changes its mind at every question: loads are made, cut short, refused, or given 5 ms."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        self._draw = random.Random(0)

    def prefill_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        seconds = super().prefill_s(uncached_tokens, cached_tokens)
        return seconds * self._draw.choice([1.0, 1.0, 1e-9])

    def saving_s(self, start_token: int, block_tokens: int) -> float:
        return block_tokens * self._draw.choice([1.0, 1.0, 1e-9])


def use_constant_cost(
    monkeypatch: pytest.MonkeyPatch, cost: type[ConstantCost] = ConstantCost
) -> None:
    """Engines opened from now on go by `cost`."""
    monkeypatch.setattr(caching, "CostModel", cost)
    monkeypatch.setattr(caching, "calibrate", lambda *_, **__: None)


def open_executor(kind: str, blocks: int, block_tokens: int = 16, seed: int = 0) -> Executor:
    """A tiny random model in float32 on the `native` or the `torch` executor; skips the test where
    there is no native one."""
    arch = architecture()
    weights = random_weights(arch, seed)
    if kind == "torch":
        return TorchExecutor(
            build_program(arch),
            weights,
            device=torch.device("cpu"),
            dtype=torch.float32,
            blocks=blocks,
            block_tokens=block_tokens,
        )
    try:
        return NativeExecutor(
            build_program(arch),
            weights,
            dtype=torch.float32,
            blocks=blocks,
            block_tokens=block_tokens,
            threads=1,
            max_tokens=STEP_TOKENS,
        )
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


class Recorder(Collector):
    """A collector that also keeps what each request says of the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[str, CacheUse] = {}

    def __call__(self, report: StepReport) -> None:
        for output in report.outputs:
            if output.cache_use is not None:
                assert output.request_id not in self.uses, "the use of the cache is told twice"
                self.uses[output.request_id] = output.cache_use
        super().__call__(report)


@dataclass
class Stage:
    """An engine over its tiers, and what came out of it."""

    engine: Engine
    executor: Executor
    cache: TieredCache
    tiers: Tiers
    out: Recorder = field(default_factory=Recorder)
    asked: dict[str, EngineRequest] = field(default_factory=dict)

    def submit(self, each: EngineRequest) -> None:
        self.asked[each.request_id] = each
        self.engine.submit(each)

    def run(self, requests: Iterable[EngineRequest]) -> None:
        """Submit all at once, wait for all."""
        names = []
        for each in requests:
            self.submit(each)
            names.append(each.request_id)
        self.out.wait(names)

    def run_one(self, each: EngineRequest) -> CacheUse:
        self.run([each])
        return self.out.uses[each.request_id]

    def wait_quiet(self, timeout_s: float = 20.0) -> None:
        """Until no transfer is under way."""
        deadline = time.monotonic() + timeout_s
        while not self.engine.call(lambda: self.cache.quiet):
            assert time.monotonic() < deadline, f"{self.tiers.in_flight} transfers do not end"
            time.sleep(0.005)

    def tier(self, tier: Tier) -> TierStats:
        return next(each for each in self.engine.cache_stats().tiers if each.tier is tier)

    def drop(self, device_from: int | None, dram_from: int | None, prompt: EngineRequest) -> None:
        """Take a prompt's blocks from these indexes on out of device and DRAM."""
        keys = chain_of(prompt, self.executor.block_tokens)

        def drop() -> None:
            dram = self.tiers.dram
            for index, key in enumerate(keys):
                if device_from is not None and index >= device_from:
                    page = self.tiers.device.find(key)
                    if page is not None:
                        self.tiers.device.drop(page)
                if dram is not None and dram_from is not None and index >= dram_from:
                    slot = dram.find(key)
                    if slot is not None:
                        dram.pool.drop(slot)

        self.engine.call(drop)

    def check(self) -> None:
        """Everything is at rest, within its budget, and adds up."""
        self.wait_quiet()
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.running == stats.waiting == 0
        tiers = {each.tier: each for each in self.engine.cache_stats().tiers}
        for tier in (Tier.DEVICE, Tier.DRAM):
            if tier in tiers:
                each = tiers[tier]
                assert each.held == 0, f"{tier} holds {each.held} blocks with nothing running"
                assert each.free + each.cached == each.total
        assert tiers[Tier.DEVICE].total == self.executor.pages.shape[0]
        self._check_counts(tiers)

    def _check_counts(self, tiers: Mapping[Tier, TierStats]) -> None:
        block_tokens = self.executor.block_tokens
        told: dict[Tier, int] = dict.fromkeys(Tier, 0)
        readable_told = readable_most = cached_told = hit_blocks = 0
        for name, each in self.asked.items():
            outcome, use = self.out.outcomes[name], self.out.uses.get(name)
            full = blocks = 0
            if each.read_cache and each.chain_root is not None:
                full = len(each.prompt_token_ids) // block_tokens
                blocks = -(-len(each.prompt_token_ids) // block_tokens)
            readable_most += blocks
            cached_told += outcome.cached_tokens
            assert outcome.cached_tokens <= max(0, len(each.prompt_token_ids) - 1)
            assert outcome.cached_tokens <= blocks * block_tokens
            if use is None:  # it may have started and been aborted before its first token
                assert outcome.finish is not FinishReason.LENGTH
                continue
            assert use.cached_tokens == outcome.cached_tokens
            told[Tier.DEVICE] += use.device_tokens
            told[Tier.DRAM] += use.dram_tokens
            told[Tier.REDIS] += use.redis_tokens
            readable_told += full
            blocks = -(-len(each.prompt_token_ids) // block_tokens)
            assert sum(run.blocks for run in use.runs) == blocks, "runs do not cover the prompt"
            position = 0
            for run in use.runs:
                assert run.first == position
                position += run.blocks
                assert (run.tier is None) == (run.miss is not None)
            hit = sum(run.blocks for run in use.runs if run.tier is not None)
            hit_blocks += hit
            used_of_last = use.cached_tokens - (hit - 1) * block_tokens
            assert not hit or 0 < used_of_last <= block_tokens
        hits = {tier: tiers[tier].hits if tier in tiers else 0 for tier in Tier}
        assert sum(hits.values()) >= hit_blocks
        assert sum(hits.values()) * block_tokens >= cached_told
        for tier in Tier:
            assert hits[tier] * block_tokens >= told[tier]
        missed = sum(tiers[Tier.DEVICE].misses.values())
        assert readable_told <= sum(hits.values()) + missed <= readable_most


@contextmanager
def running_stage(
    kind: str,
    store: RedisStore | None = None,
    *,
    blocks: int = 48,
    block_tokens: int = 16,
    dram_blocks: int = 96,
    write_through: bool = False,
    model: int = 0,
    wrap: Callable[[Executor], Executor] | None = None,
) -> Iterator[Stage]:
    """A started engine; closed in the end. `model` seeds the weights and is part of the identity;
    `wrap` puts something around the executor."""
    executor = open_executor(kind, blocks, block_tokens, model)
    if wrap is not None:
        executor = wrap(executor)
    identity = CacheIdentity(
        weights=f"weights {model}",
        adapter="",
        kv_dtype="float32",
        layout=executor.kv_layout,
        block_tokens=block_tokens,
        topology="tp1",
    )
    options = CacheOptions(
        dram_bytes=dram_blocks * (int(executor.pages.shape[1]) + 1024),
        redis=store,
        write_through=write_through,
        ahead_tokens=4 * block_tokens,
        max_context=MAX_CONTEXT,
    )
    opened: list[TieredCache] = []
    cost = measure_cost(executor, 10_000, step_tokens=STEP_TOKENS, max_context=MAX_CONTEXT)
    opener = tiers_opener(cost, identity, options)

    def open_cache(executor: Executor, wake: Callable[[], None]) -> TieredCache:
        opened.append(opener(executor, wake))
        return opened[0]

    out = Recorder()
    engine = Engine(
        executor,
        frozenset(),
        EngineOptions(MAX_CONTEXT, MAX_RUNNING, STEP_TOKENS, prompt_logprob_tokens=32),
        out,
        open_cache,
    )
    tiers = opened[0]._tiers  # what is under test is their content, which nobody else may touch
    engine.start()
    try:
        yield Stage(engine, executor, opened[0], tiers, out)
    finally:
        engine.close()


def ask(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 4,
    *,
    tenant: str = TENANTS[0],
    user: str | None = None,
    shared_tokens: int = 0,
    priority: int = 0,
    **params: object,
) -> EngineRequest:
    """A request of a tenant's; greedy, with log-probabilities, unless `params` say otherwise. Its
    first `shared_tokens` tokens are everybody's."""
    plain = request(name, list(prompt), max_tokens, priority=priority, **{"logprobs": 1, **params})
    shared = None
    if shared_tokens:
        shared = SharedPrefix(shared_root(SECRET, "tokenizer"), shared_tokens)
    return replace(
        plain,
        chain_root=chain_root(SECRET, tenant, user or "", "tokenizer"),
        owner=owner_of(tenant, user),
        shared=shared,
    )


def owner_of(tenant: str, user: str | None = None) -> Owner:
    return owner_tags(SECRET, tenant, user)


def tokens(seed: object, count: int) -> list[int]:
    """Random token ids of the tiny models' vocabulary."""
    draw = random.Random(f"{seed}")
    return [draw.randrange(VOCAB) for _ in range(count)]


def chain_of(each: EngineRequest, block_tokens: int) -> list[BlockKey]:
    """The keys of a prompt's full blocks."""
    return EngineSequence(each, 0).block_keys(block_tokens, len(each.prompt_token_ids))


class Held:
    """Something whose calls of the given names wait until they are released; others go through."""

    def __init__(self, real: Any, *names: str) -> None:
        self._real = real
        self._names = names
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if name not in self._names:
            return real

        def later(*args: Any) -> bool:
            with self._lock:
                if name in self._names:
                    self._waiting.append(lambda: real(*args))
                    return True
            return bool(real(*args))

        return later

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return len(self._waiting)

    def release(self) -> None:
        """Let go of what waits, and hold nothing any more."""
        with self._lock:
            self._names = ()
            waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def close(self) -> None:
        self.release()
        self._real.close()


def hold(stage: Stage, step: str) -> Held:
    """From now on every "probe", "fetch" or "store" of Redis, or "upload" or "download" of the
    copier, waits."""

    def put() -> Held:
        tiers = stage.tiers
        if step in ("upload", "download"):
            assert tiers.dram is not None
            held = Held(tiers.dram.copier, step)
            tiers.dram.copier = held  # type: ignore[assignment]  # stands in for it
        else:
            held = Held(tiers.redis, step)
            tiers.redis = held  # type: ignore[assignment]  # stands in for it
        return held

    return stage.engine.call(put)
