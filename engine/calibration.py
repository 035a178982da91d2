"""A few real steps before the first request, so that predictions are of this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from engine.executors.base import Executor, StepBatch
from policies.cost import CostModel, StepShape

_TIME_S = 0.4
_BATCH = 8
_SMALLEST_CHUNK = 8


def calibrate(executor: Executor, cost: CostModel, *, step_tokens: int, max_context: int) -> None:
    """Run decode and prefill steps at short and long context, and let `cost` learn from them.

    For the time before any request: it writes to the pages and leaves those zero. Takes at most
    0.4 s beside warming up and the first step: one that is predicted to take longer than is left is
    made smaller or left out.
    """
    blocks = int(executor.pages.shape[0])
    longest = min(max_context, blocks * executor.block_tokens)
    chunk = max(1, min(step_tokens, longest))
    batch = max(1, min(_BATCH, step_tokens, blocks))
    short = min(executor.block_tokens, longest)
    pages = max(batch, -(-longest // executor.block_tokens))
    executor.pages[:pages].zero_()  # resident from here on
    steps = _Steps(executor, cost)
    steps.begin()
    # what tells most comes first: on a slow or busy machine the rest may not be reached
    steps.run_chunk(0, min(chunk, max(_SMALLEST_CHUNK, chunk // 8)))
    steps.run([(longest - 1, 1)])
    steps.run([(short - 1, 1)] * batch)
    steps.run_chunk(0, chunk)
    steps.run_chunk((longest - chunk) // 2, chunk)
    steps.run([(0, 1)])
    steps.run([(longest - 1, 1)])
    steps.run([(short - 1, 1)] * batch)
    executor.pages[:pages].zero_()


class _Steps:
    """Runs steps of given shapes over pages that nobody else uses yet.

    A sequence is (computed tokens, tokens to compute). One alone lies in the pages from 0 on; of
    several, which must not be longer than a block, each has a page of its own.
    """

    def __init__(self, executor: Executor, cost: CostModel) -> None:
        self._executor = executor
        self._cost = cost
        self._deadline = 0.0

    def begin(self) -> None:
        """The shortest step, once to warm up and once in earnest, however long it takes; the time
        that may be spent runs from after it."""
        shortest = [(0, 1)]
        self._seconds(self._batch(shortest))
        self._measure(shortest)
        self._deadline = time.perf_counter() + _TIME_S

    def run_chunk(self, computed: int, tokens: int) -> None:
        """A prefill step, halved until it is predicted to take at most half the time left."""
        while tokens > _SMALLEST_CHUNK and not self._fits([(computed, tokens)], share=0.5):
            tokens //= 2
        self.run([(computed, tokens)])

    def run(self, sequences: Sequence[tuple[int, int]]) -> None:
        """One step, if there is time; the cost model learns what it took."""
        if not self._fits(sequences):
            return
        if self._executor.device.type == "cuda":  # the first of a shape chooses and loads kernels
            self._deadline += self._seconds(self._batch(sequences))
        self._measure(sequences)

    def _measure(self, sequences: Sequence[tuple[int, int]]) -> None:
        self._cost.observe_step(_shape(sequences), self._seconds(self._batch(sequences)))

    def _fits(self, sequences: Sequence[tuple[int, int]], share: float = 1.0) -> bool:
        left_s = self._deadline - time.perf_counter()
        return self._cost.step_s(_shape(sequences)) < share * left_s

    def _seconds(self, batch: StepBatch) -> float:
        started = time.perf_counter()
        self._executor.forward(batch)[-1, 0].item()  # waits for the device
        return time.perf_counter() - started

    def _batch(self, sequences: Sequence[tuple[int, int]]) -> StepBatch:
        counts = [tokens for _, tokens in sequences]
        lengths = [computed + tokens for computed, tokens in sequences]
        ends = np.cumsum([0, *counts], dtype=np.int32)
        positions = [np.arange(computed, computed + tokens) for computed, tokens in sequences]
        pages = -(-max(lengths) // self._executor.block_tokens)
        return StepBatch(
            token_ids=np.zeros(sum(counts), dtype=np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            query_starts=ends,
            context_lengths=np.asarray(lengths, dtype=np.int32),
            block_tables=np.arange(len(sequences) * pages, dtype=np.int32).reshape(-1, pages),
            logit_rows=ends[1:] - 1,
        )


def _shape(sequences: Sequence[tuple[int, int]]) -> StepShape:
    return StepShape(
        tokens=sum(tokens for _, tokens in sequences),
        sequences=len(sequences),
        attended=sum(n * computed + n * (n + 1) // 2 for computed, n in sequences),
        context_read=sum(computed + tokens for computed, tokens in sequences),
    )
