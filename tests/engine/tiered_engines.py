"""Engines over real tiers: tiny float32 models, a real copier, a real Redis.

Moving a block always looks cheaper than computing it here, since a tiny model computes faster than
any tier answers: what is tested is that it makes no difference to the text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from cache.block import NOBODY, Owner, Tier
from cache.hashing import chain_root, owner_tags, shared_root
from cache.identity import CacheIdentity
from cache.redis_store import RedisStore
from cache.report import Miss, TierStats
from cache.tiered_cache import TieredCache
from engine import caching
from engine.architecture import Architecture
from engine.caching import CacheOptions, tiers_opener
from engine.decoder import build_program
from engine.engine import Engine, EngineOptions
from engine.executors.base import Executor
from engine.executors.torch_executor import TorchExecutor
from engine.report import StepReport
from engine.request import EngineRequest, FinishReason, SharedPrefix
from policies.cost import CostModel, StepShape
from tests.engine.harness import Collector, Outcome, request
from tests.engine.native_models import VOCAB, architecture, open_native, random_weights

SECRET = b"the server's secret"
MAX_CONTEXT = 320
SHARED_TOKENS = 32


class ConstantCost(CostModel):
    """Says for ever that computing takes long: nothing is learned of the tiny model's real speed.

    `token_s` seconds a token, so that a load's deadline is the tokens' number times that.
    """

    token_s = 1.0

    def __init__(self, **shape: float) -> None:
        super().__init__(**shape)  # type: ignore[arg-type]

    def prefill_s(self, uncached_tokens: int, cached_tokens: int, step_tokens: int = 256) -> float:
        return self.token_s * max(0, uncached_tokens)

    def saving_s(self, start_token: int, block_tokens: int) -> float:
        return self.token_s * block_tokens

    def observe_step(self, shape: StepShape, seconds: float) -> None:
        pass

    def observe_load(self, tier: str, blocks: int, seconds: float) -> None:
        pass


@pytest.fixture
def constant_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines made in this test go by `ConstantCost`."""
    monkeypatch.setattr(caching, "CostModel", ConstantCost)
    monkeypatch.setattr(caching, "calibrate", lambda *_, **__: None)


def open_executor(
    kind: str, *, blocks: int, block_tokens: int = 16, arch: Architecture | None = None
) -> Executor:
    """A tiny random model in float32 on the `native` or the `torch` executor."""
    arch = arch or architecture()
    if kind == "native":
        return open_native(
            arch, blocks=blocks, block_tokens=block_tokens, threads=1, max_tokens=STEP_TOKENS
        )
    import torch

    return TorchExecutor(
        build_program(arch),
        random_weights(arch),
        device=torch.device("cpu"),
        dtype=torch.float32,
        blocks=blocks,
        block_tokens=block_tokens,
    )


STEP_TOKENS = 64


@dataclass
class Recorder(Collector):
    """A collector that also keeps what each request says of the cache."""

    cached: dict[str, int] = field(default_factory=dict)

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[str, object] = {}

    def __call__(self, report: StepReport) -> None:
        for output in report.outputs:
            if output.cache_use is not None:
                assert output.request_id not in self.uses, "the cache's use is told twice"
                self.uses[output.request_id] = output.cache_use
        super().__call__(report)


@dataclass
class Stage:
    """An engine, its cache and what came out."""

    engine: Engine
    executor: Executor
    cache: TieredCache
    out: Recorder
    requests: dict[str, EngineRequest] = field(default_factory=dict)
