"""Steps before the first request: what they teach, and that they leave no trace."""

from types import SimpleNamespace

import pytest
import torch

from engine.calibration import calibrate
from engine.executors.base import StepBatch
from policies.cost import CostModel, StepShape
from tests.engine.mock_executor import VOCAB, MockExecutor
from tests.engine.native_models import architecture, open_reference


class Clock:
    """Stands still unless an executor moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("engine.calibration.time", SimpleNamespace(perf_counter=clock))
    return clock


class TimedExecutor(MockExecutor):
    """Takes a known time for each step, and leaves its mark in the pages."""

    def __init__(self, clock: Clock, blocks: int, *, step_s: float, token_s: float) -> None:
        super().__init__(blocks)
        self.clock = clock
        self.step_s = step_s
        self.token_s = token_s
        self.contexts: list[int] = []
        self.marked: set[int] = set()

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self.clock.now_s += self.step_s + self.token_s * len(batch.token_ids)
        self.steps.append((len(batch.token_ids), len(batch.context_lengths)))
        self.contexts.append(int(batch.context_lengths.max()))
        for s, table in enumerate(batch.block_tables):
            first, last = batch.query_starts[s : s + 2]
            for position in batch.positions[first:last]:
                page = int(table[position // self.block_tokens])
                self.pages[page] = 7
                self.marked.add(page)
        return torch.zeros(len(batch.logit_rows), VOCAB)


def model() -> CostModel:
    return CostModel(token_flops=2e8, weight_bytes=2e8, kv_token_bytes=64, block_bytes=1024)


def test_decode_and_prefill_are_learned_and_the_pages_are_zero_again(clock):
    executor = TimedExecutor(clock, 64, step_s=1e-3, token_s=50e-6)
    cost = model()
    calibrate(executor, cost, step_tokens=128, max_context=512)
    assert cost.decode_step_s(1, 100) == pytest.approx(1.05e-3, rel=0.05)
    assert cost.decode_step_s(8, 16) == pytest.approx(1.4e-3, rel=0.05)
    assert cost.step_s(StepShape(128, 1, 128 * 64, 128)) == pytest.approx(7.4e-3, rel=0.05)
    assert {(1, 1), (8, 8), (128, 1)} <= set(executor.steps)
    assert max(executor.contexts) == 512
    assert executor.marked
    assert not executor.pages.any()


def test_a_slow_model_is_not_kept_waiting_for(clock):
    executor = TimedExecutor(clock, 64, step_s=50e-3, token_s=10e-3)
    calibrate(executor, model(), step_tokens=256, max_context=1024)
    assert clock.now_s < 0.6
    assert not executor.pages.any()


def test_a_model_far_faster_than_assumed_gets_its_whole_chunk(clock):
    executor = TimedExecutor(clock, 64, step_s=10e-6, token_s=0.0)
    slow_guess = CostModel(
        token_flops=1e12, weight_bytes=1e11, kv_token_bytes=1e5, block_bytes=1024
    )
    calibrate(executor, slow_guess, step_tokens=256, max_context=1024)
    assert (256, 1) in executor.steps
    assert slow_guess.prefill_s(256, 0) < 0.1


@pytest.mark.parametrize(
    ("blocks", "step_tokens", "max_context"),
    [(1, 256, 2048), (3, 1, 40), (64, 256, 5), (4, 7, 64)],
)
def test_it_stays_within_pages_budget_and_context(clock, blocks, step_tokens, max_context):
    executor = TimedExecutor(clock, blocks, step_s=1e-3, token_s=0.0)
    calibrate(executor, model(), step_tokens=step_tokens, max_context=max_context)
    assert max(tokens for tokens, _ in executor.steps) <= step_tokens
    assert max(executor.contexts) <= min(max_context, blocks * 16)
    assert not executor.pages.any()


def test_a_real_executor_computes_them():
    executor = open_reference(architecture())
    cost = model()
    calibrate(executor, cost, step_tokens=32, max_context=256)
    assert not executor.pages.any()
    assert {"prefill_error", "decode_error"} <= cost.snapshot().keys()
    executor.close()
