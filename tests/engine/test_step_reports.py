"""What an engine tells of the work in its steps."""

from __future__ import annotations

import pytest
import torch

from engine.decoder import build_program
from engine.engine import Engine, EngineOptions
from engine.executors.torch_executor import TorchExecutor
from engine.peaks import ReadsMemory, measure_peaks
from engine.step_work import ModelWork
from tests.engine.harness import Collector, request, run_all
from tests.engine.native_models import BLOCKS, gemma_like, random_weights

ARCHITECTURE = gemma_like()  # windows of 20 and 70 tokens beside full attention


def open_executor() -> TorchExecutor:
    return TorchExecutor(
        build_program(ARCHITECTURE),
        random_weights(ARCHITECTURE),
        device=torch.device("cpu"),
        dtype=torch.float32,
        blocks=BLOCKS,
        block_tokens=16,
    )


def steps_of(model_work: ModelWork | None) -> list:
    collector = Collector()
    options = EngineOptions(max_context=128, max_running=4, step_tokens=16)
    engine = Engine(open_executor(), frozenset(), options, collector, model_work=model_work)
    engine.start()
    try:
        prompts = ([1 + n for n in range(40)], [5, 4, 3])
        run_all(
            engine,
            collector,
            [request(f"r{n}", prompt, 4) for n, prompt in enumerate(prompts)],
        )
    finally:
        engine.close()
    return [report for report in collector.reports if report.sequences]


def test_steps_say_what_they_needed_and_others_nothing() -> None:
    work = ModelWork.of(ARCHITECTURE, 4, 16)
    steps = steps_of(work)
    assert sum(each.tokens for each in steps) == 40 + 3 + 2 * 3
    for each in steps:
        assert each.work.flops >= work.linear_flops * each.tokens
        assert each.work.bytes >= work.linear_bytes
        assert each.work.prefill == (each.tokens > each.sequences)
    assert {each.work.prefill for each in steps} == {True, False}
    positions = [*range(40 + 3), *range(3 + 3)]  # the last token's KV is not computed
    attended = sum(
        min(position + 1, layer.window or 128)
        for position in positions
        for layer in ARCHITECTURE.layers
    )
    assert sum(each.work.flops for each in steps) == (
        work.linear_flops * len(positions) + work.head_flops * 8 + work.attention_flops * attended
    )


def test_an_engine_that_knows_no_shape_says_nothing_of_work() -> None:
    steps = steps_of(None)
    assert steps
    assert all(each.work is None for each in steps)


def test_a_step_that_failed_says_nothing_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise ValueError("broken")

    monkeypatch.setattr(TorchExecutor, "forward", fail)
    steps = steps_of(ModelWork.of(ARCHITECTURE, 4, 16))
    assert steps
    assert all(each.work is None for each in steps)


@pytest.mark.parametrize("reads", [False, True])
def test_peaks_are_of_the_device(reads: bool) -> None:
    class Reading(TorchExecutor):
        read = 0

        def read_memory(self, region: torch.Tensor) -> None:
            assert region.is_contiguous()
            self.read += region.nbytes
            int(region[:: 1 << 12].sum())

    executor = open_executor()
    if reads:
        executor.__class__ = Reading
    assert isinstance(executor, ReadsMemory) == reads
    try:
        peaks, threads = measure_peaks(executor, 1), torch.get_num_threads()
        assert peaks is not None
        assert 1e8 < peaks.flops_per_s < 1e14
        assert peaks.bytes_per_s > 1e8
        assert torch.get_num_threads() == threads
        assert not reads or executor.read >= 4 * (128 << 20)
    finally:
        executor.close()


def test_peaks_without_memory_are_unknown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    executor = open_executor()
    try:
        monkeypatch.setattr(torch, "ones", no_memory)
        assert measure_peaks(executor, 1) is None
        assert "can't allocate memory" in caplog.text
    finally:
        executor.close()
