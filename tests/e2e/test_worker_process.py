"""A real model in a worker's process: the same text as in ours, also after it was lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cache.envelope import KEY_PREFIX
from cache.hashing import chain_root, owner_tags
from cache.redis_options import RedisOptions
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from gateway.replica import Replica, ReplicaUnavailable
from gateway.replicas.engine_opening import load_engine
from gateway.replicas.in_process import InProcessReplica
from gateway.replicas.worker.cores import share_cores
from gateway.replicas.worker.replica import WorkerReplica
from gateway.replicas.worker.work_order import WorkOrder
from gateway.settings import ModelSettings
from gateway.settings_cache import CacheSettings
from gateway.utilization_metrics import UtilizationCollector
from tests.cache.valkey import Valkey
from tests.gateway.replicas.worker_stage import Stage, child_pids, make_replica

SECRET = b"0" * 32
TAGS = owner_tags(SECRET, "acme", None)
PROMPTS = [[3 + (7 * n * i + i) % 250 for i in range(24 + 9 * n)] for n in range(8)]


def model(tiny: Path) -> ModelSettings:
    cache = CacheSettings(device=16 << 20, dram=16 << 20)
    return ModelSettings(name="m", path=tiny, dtype="float32", max_context=512, cache=cache)


def ask(name: str, prompt: list[int], **changes: object) -> EngineRequest:
    params = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **changes}
    return EngineRequest(
        name,
        prompt,
        SamplingParams(**params),  # type: ignore[arg-type] # any field of it
        chain_root(SECRET, "acme", "tenant", "tokenizer"),
        owner=TAGS,
    )


QUESTIONS = [
    *(ask(f"greedy-{n}", prompt) for n, prompt in enumerate(PROMPTS)),
    ask("seeded", PROMPTS[0], temperature=1.0, seed=7, frequency_penalty=0.5, logprobs=2),
]


async def outcome(replica: Replica, each: EngineRequest) -> tuple[list[int], list[float], int]:
    """Tokens, their log-probabilities, and how many of the prompt came from the cache."""
    tokens: list[int] = []
    logprobs: list[float] = []
    cached = 0
    async with replica.submit(each) as stream:
        async for output in stream:
            tokens += output.token_ids
            logprobs += [entry.logprob for entry in output.logprobs]
            cached = output.cached_tokens
    return tokens, logprobs, cached


async def in_this_process(settings: ModelSettings) -> list[tuple[list[int], list[float]]]:
    loaded = await asyncio.to_thread(load_engine, settings, lambda *_: None)
    used = UtilizationCollector()
    used.watch("m/0", loaded.facts.peaks)
    replica = InProcessReplica(
        "m/0",
        lambda sink: loaded.open(sink, None),
        max_open=99,
        cost=loaded.facts.cost,
        observe=used.observe,
    )
    replica.start()
    try:
        answers = await asyncio.gather(*(outcome(replica, each) for each in QUESTIONS))
    finally:
        await replica.close()
    for utilization in used.of("m/0").values():
        assert utilization is not None
        assert 0.0 < utilization.mfu <= 1.0
        assert 0.0 < utilization.mbu <= 1.0
    return [(tokens, logprobs) for tokens, logprobs, _ in answers]


@asynccontextmanager
async def worker(stage: Stage, order: WorkOrder) -> AsyncIterator[WorkerReplica]:
    replica = make_replica(stage, order)
    await replica.start(stage.on_progress)
    try:
        yield replica
    finally:
        await replica.close()


async def test_a_worker_answers_as_this_process_does_and_comes_back_as_it_was(
    tiny: Path, valkey: Valkey
) -> None:
    settings = model(tiny)
    redis = RedisOptions(url=valkey.url, secret=SECRET, timeout_s=2.0)
    [cores] = share_cores([1])
    order = WorkOrder(settings, cores, os.environ, redis)
    expected = await in_this_process(settings)
    others = set(child_pids())
    stage = Stage()
    async with worker(stage, order) as replica, asyncio.timeout(120):
        answers = await asyncio.gather(*(outcome(replica, each) for each in QUESTIONS))
        assert [(tokens, logprobs) for tokens, logprobs, _ in answers] == expected
        facts = stage.facts[0]
        assert (facts.max_context, facts.dtype, facts.block_tokens) == (512, "float32", 16)
        assert {what for what, _, _ in stage.progress} >= {"weights"}
        assert facts.peaks is not None

        assert replica.stats().steps > 0
        assert (await outcome(replica, ask("again", PROMPTS[7])))[2] > 0
        erased = await replica.erase_cache(TAGS.tenant, None)
        assert erased.device > 0
        assert (await outcome(replica, ask("erased", PROMPTS[7])))[2] == 0

        async with replica.submit(ask("lost", PROMPTS[0], max_tokens=400)) as stream:
            await anext(stream)
            [pid] = set(child_pids()) - others
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ReplicaUnavailable):
                async for _ in stream:
                    pass
        await stage.until_lives(2)
        answers = await asyncio.gather(*(outcome(replica, each) for each in QUESTIONS))
        assert [(tokens, logprobs) for tokens, logprobs, _ in answers] == expected
    assert set(child_pids()) == others

    assert stage.facts[0].cache_identity == stage.facts[1].cache_identity
    identity = stage.facts[1].cache_identity.hex()
    with valkey.client() as client:
        saved = client.keys(KEY_PREFIX + identity.encode() + b":*")
    assert saved  # when it was closed
