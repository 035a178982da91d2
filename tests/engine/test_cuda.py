"""The CUDA path: the same numbers as on the CPU, and tiers around it. Skipped without a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cache.identity import CacheIdentity
from cache.tiered_cache import TieredCache
from engine.attention.batched import batched_attention
from engine.attention.reference import reference_attention
from engine.caching import CacheOptions, measure_cost, tiers_opener
from engine.decoder import build_program
from engine.engine import Engine, EngineOptions
from engine.executors.torch_executor import TorchExecutor
from engine.peaks import measure_peaks
from engine.sampling.sampler import Sampler
from tests.engine.harness import Collector, request, run_all
from tests.engine.native_models import (
    ARCHITECTURES,
    BLOCKS,
    Sequence,
    architecture,
    make_step,
    open_reference,
    random_ids,
    random_weights,
)
from tests.engine.test_sampler import MIXED, mixed_rows, random_logits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def on_cuda(arch, dtype=torch.float32, *, blocks=BLOCKS, attention=batched_attention):
    return TorchExecutor(
        build_program(arch),
        random_weights(arch),
        device=torch.device("cuda"),
        dtype=dtype,
        blocks=blocks,
        block_tokens=16,
        attention=attention,
    )


def test_peaks_are_those_of_a_gpu():
    executor = on_cuda(architecture(), torch.bfloat16)
    before = torch.cuda.memory_allocated()
    peaks = measure_peaks(executor, 1)
    assert peaks is not None
    assert peaks.flops_per_s > 1e12
    assert peaks.bytes_per_s > 1e11
    assert torch.cuda.memory_allocated() == before
    executor.close()


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_logits_agree_with_the_cpu_reference(name):
    arch = ARCHITECTURES[name]
    expected, actual = open_reference(arch), on_cuda(arch)
    for executor in (expected, actual):
        executor.results = []
        one = Sequence(random_ids(60, 1), [3, 1, 7, 9])
        two = Sequence(random_ids(40, 2), [2, 5, 11])
        for parts in ([(one, 33)], [(two, 17), (one, 20)], [(one, 1), (two, 1)], [(two, 22)]):
            executor.results.append(executor.forward(make_step(parts)).cpu().clone())
    for want, got in zip(expected.results, actual.results, strict=True):
        assert torch.allclose(want, got, atol=2e-4, rtol=1e-3), (want - got).abs().max()


def test_bfloat16_stays_near_float32():
    arch = architecture()
    exact, rounded = on_cuda(arch), on_cuda(arch, torch.bfloat16)
    batch = make_step([(Sequence(random_ids(60, 1), [3, 1, 7, 9]), 60)])
    want, got = exact.forward(batch).cpu(), rounded.forward(batch).cpu()
    assert (want - got).abs().max() < 0.15
    assert (want.argmax(-1) == got.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["grouped", "multi_head", "window", "gemma_like", "head_dim_256"])
def test_prefill_needs_no_matrix_of_all_scores(name, dtype):
    arch = ARCHITECTURES[name]
    expected, actual = on_cuda(arch, dtype, attention=reference_attention), on_cuda(arch, dtype)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        for executor in (expected, actual):
            one = Sequence(random_ids(60, 1), [3, 1, 7, 9])
            steps = [executor.forward(make_step([(one, count)])).clone() for count in (33, 20, 7)]
            executor.logits = torch.cat(steps)
    error = (actual.logits - expected.logits).norm() / expected.logits.norm()
    assert error < (1e-4 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("wants_logits", [True, False])
def test_a_step_that_nobody_reads_is_over_when_it_returns(wants_logits):
    def slow_attention(*args):
        torch.cuda._sleep(100_000_000)  # some hundredths of a second
        return batched_attention(*args)

    executor = on_cuda(architecture(), attention=slow_attention)
    batch = make_step([(Sequence(random_ids(60, 1), [3, 1, 7, 9]), 60)])
    if not wants_logits:
        batch.logit_rows = batch.logit_rows[:0]
    executor.forward(batch)  # loads kernels
    torch.cuda.synchronize()
    executor.forward(batch)
    assert torch.cuda.current_stream().query() is not wants_logits


def test_sampling_chooses_as_on_the_cpu():
    logits = random_logits(len(MIXED), 49_157, seed=3)
    here = Sampler().sample(logits.clone(), mixed_rows())
    there = Sampler().sample(logits.cuda(), mixed_rows())
    assert [each.token_id for each in there] == [each.token_id for each in here]
    for one, other in zip(here, there, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None:
            assert other.logprobs.logprob == pytest.approx(one.logprobs.logprob, abs=1e-5)
            assert [token for token, _ in other.logprobs.top] == [
                token for token, _ in one.logprobs.top
            ]


def open_engine(*, blocks: int, dram_blocks: int) -> tuple[Engine, Collector, list[TieredCache]]:
    executor = on_cuda(architecture(), blocks=blocks)
    block_bytes = int(executor.pages.shape[1])
    caches: list[TieredCache] = []
    opener = tiers_opener(
        measure_cost(executor, 100_000, step_tokens=64, max_context=256),
        CacheIdentity("w", "", "float32", executor.kv_layout, 16, "tp1"),
        CacheOptions(dram_bytes=dram_blocks * (block_bytes + 256), max_context=256),
    )

    def open_cache(executor, wake):
        caches.append(opener(executor, wake))
        return caches[0]

    collector = Collector()
    options = EngineOptions(max_context=256, max_running=4, step_tokens=64)
    engine = Engine(executor, frozenset(), options, collector, open_cache)
    engine.start()
    return engine, collector, caches


@pytest.mark.parametrize("lockable", [True, False])
def test_text_from_device_and_dram_equals_the_cold_text(lockable, monkeypatch, caplog):
    if not lockable:
        monkeypatch.setattr("cache.host_arena._pin", refuse)
    engine, collector, _ = open_engine(blocks=40, dram_blocks=200)
    prompts = [random_ids(100 + i, 100 + i).tolist() for i in range(12)]
    try:
        cold = []
        for i, prompt in enumerate(prompts):
            run_all(engine, collector, [request(f"cold-{i}", prompt, root=b"%016d" % i)])
            cold.append(collector.outcomes[f"cold-{i}"].token_ids)
        for i, prompt in enumerate(prompts):  # the pool holds five of the twelve
            run_all(engine, collector, [request(f"warm-{i}", prompt, root=b"%016d" % i)])
        warm = [collector.outcomes[f"warm-{i}"] for i in range(12)]
        assert [outcome.token_ids for outcome in warm] == cold
        tiers = {tier.tier: tier for tier in engine.cache_stats().tiers}
        assert tiers["dram"].hits > 0
        assert tiers["dram"].loads == tiers["dram"].hits
        rng = np.random.default_rng(5)
        together = [
            request(f"mix-{n}", prompts[i], root=b"%016d" % i)
            for n, i in enumerate(rng.integers(0, 12, 40).tolist())
        ]
        run_all(engine, collector, together)
        order = np.random.default_rng(5).integers(0, 12, 40).tolist()
        assert [collector.outcomes[f"mix-{n}"].token_ids for n in range(40)] == [
            cold[i] for i in order
        ]
        engine.check_integrity()
    finally:
        engine.close()
    assert ("not page-locked" in caplog.text) is not lockable


def refuse(*_):
    raise MemoryError("too much to lock")


def test_prompt_logprobs_and_sampled_text_repeat():
    engine, collector, _ = open_engine(blocks=40, dram_blocks=40)
    prompt = random_ids(150, 4).tolist()
    asked = {"temperature": 1.0, "seed": 7, "top_p": 0.9, "logprobs": 3}
    try:
        requests = [request(f"sampled-{n}", prompt, 16, **asked) for n in range(3)]
        requests.append(request("scored", prompt, prompt_logprobs=2))
        for each in requests:
            run_all(engine, collector, [each])
        outcomes = collector.outcomes
        first, *others = (outcomes[f"sampled-{n}"].token_ids for n in range(3))
        assert others == [first, first]
        assert outcomes["sampled-1"].cached_tokens > 0
        assert len(outcomes["scored"].prompt_logprobs) == len(prompt) - 1
    finally:
        engine.close()
