"""An executor whose "KV" is the token ids themselves, so that any paging fault changes the text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import xxhash

from engine.executors.base import StepBatch

VOCAB = 97
LAYERS = 4


def next_token(history: list[int]) -> int:
    """The token that the mock model says after `history`."""
    return xxhash.xxh3_64_intdigest(np.asarray(history, dtype="<i4").tobytes()) % VOCAB


def expected_text(prompt: list[int], tokens: int) -> list[int]:
    """What a lone, cold, greedy run generates."""
    history = list(prompt)
    for _ in range(tokens):
        history.append(next_token(history))
    return history[len(prompt) :]


class MockExecutor:
    """Stores token ids in pages, reads its whole history back through the block table.

    A step that is started stores them in its first of four layers, again whenever it is gone on
    with, and reads them after the last: what touches its pages or its batch while it lies aside
    changes the text, and so do pages of its that are somebody else's by then.
    """

    name = "mock"
    kv_layout = "token-ids"
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, blocks: int, block_tokens: int = 16) -> None:
        self.block_tokens = block_tokens
        self.pages = torch.zeros(blocks, block_tokens * 4, dtype=torch.uint8)
        self._ids = self.pages.numpy().view(np.int32)
        self.poison: int | None = None  # a token id whose presence makes forward raise
        self.nan_token: int | None = None  # a last token whose logits come out as NaN
        self.steps: list[tuple[int, int]] = []  # (tokens, sequences), in the order of their ends
        self.pauses: list[int] = []  # the layers after which steps were put aside
        self.in_layer: Callable[[int], None] | None = None  # called in every layer of `start`
        self.closed = False
        self._asked = False
        self._aside: tuple[StepBatch, int] | None = None  # and the layer that is next

    def start(self, batch: StepBatch) -> torch.Tensor | None:
        self._check(batch)
        self._store(batch)
        return self._walk(batch, 0)

    def resume(self) -> torch.Tensor | None:
        if self._aside is None:
            raise RuntimeError("no step lies aside")
        self._store(self._aside[0])
        return self._walk(*self._aside)

    def pause(self) -> None:
        self._asked = True

    def unpause(self) -> None:
        self._asked = False

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self._check(batch)
        self._store(batch)
        return self._read(batch)

    def _check(self, batch: StepBatch) -> None:
        if self.poison is not None and (batch.token_ids == self.poison).any():
            raise RuntimeError("poisoned")

    def _walk(self, batch: StepBatch, first: int) -> torch.Tensor | None:
        self._aside = None
        for layer in range(first, LAYERS):
            if self.in_layer is not None:
                self.in_layer(layer)
            if self._asked and layer + 1 < LAYERS:
                self.pauses.append(layer)
                self._aside = batch, layer + 1
                return None
        return self._read(batch)

    def _store(self, batch: StepBatch) -> None:
        for s in range(len(batch.context_lengths)):
            for row in range(int(batch.query_starts[s]), int(batch.query_starts[s + 1])):
                block, slot = divmod(int(batch.positions[row]), self.block_tokens)
                self._ids[batch.block_tables[s][block], slot] = batch.token_ids[row]

    def _read(self, batch: StepBatch) -> torch.Tensor:
        self.steps.append((len(batch.token_ids), len(batch.context_lengths)))
        logits = torch.zeros(len(batch.logit_rows), VOCAB)
        wanted = {int(row): index for index, row in enumerate(batch.logit_rows)}
        for s, length in enumerate(batch.context_lengths.tolist()):
            first, last = int(batch.query_starts[s]), int(batch.query_starts[s + 1])
            assert batch.positions[last - 1] == length - 1
            table = batch.block_tables[s]
            stored = self._ids[table[: -(-length // self.block_tokens)]].reshape(-1)[:length]
            for row in range(first, last):
                if row in wanted:
                    history = stored[: int(batch.positions[row]) + 1].tolist()
                    logits[wanted[row], next_token(history)] = 10.0
                    if history[-1] == self.nan_token:
                        logits[wanted[row]] = float("nan")
        return logits

    def close(self) -> None:
        self.closed = True
