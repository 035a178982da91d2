"""The seam between the step loop and whatever computes a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


@dataclass(slots=True)
class StepBatch:
    """One step's work: the tokens of several sequences, flattened one after another.

    All arrays are C-contiguous int32. `T` tokens over `S` sequences, `R` logit rows.
    Sequence s owns rows query_starts[s]:query_starts[s + 1]; its tokens stand at consecutive
    positions that end at context_lengths[s] - 1, so context_lengths counts the tokens whose KV is
    in the pages once this step has run. Pages for all of them are already in the block table.
    """

    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    query_starts: Int32Array  # [S + 1]
    context_lengths: Int32Array  # [S]
    block_tables: Int32Array  # [S, longest table]; unused entries are 0
    logit_rows: Int32Array  # [R] indices into the T rows, ascending


class Executor(Protocol):
    """Runs a decoder program over paged KV. One caller thread at a time.

    `pages` is a uint8 tensor [blocks, bytes_per_block] on `device`: block-major, so that one block
    is one contiguous region over all layers. `kv_layout` names the arrangement inside a block and
    is part of the cache identity. Pages start zero-filled.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    kv_layout: str
    block_tokens: int
    pages: torch.Tensor

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Compute the step, write its KV into `pages`, return logits float32 [R, vocab].

        The returned tensor is valid until the next call. A row's result does not depend on the
        other rows of the batch (exactly in float32 on the native executor; to rounding elsewhere).
        """
        ...

    def close(self) -> None:
        """Give back threads and memory. Idempotent; `forward` is an error afterwards."""
        ...


@runtime_checkable
class PausableExecutor(Executor, Protocol):
    """An executor whose step can be put aside half done, and gone on with later.

    One step at a time lies aside. Meanwhile `forward` runs others, whose logits are apart from its
    own, and its batch is not touched: neither the arrays nor the pages that it names. However often
    it pauses, what comes out is the same bits.
    """

    def start(self, batch: StepBatch) -> torch.Tensor | None:
        """As `forward`, but None when it was asked to `pause`: the step lies aside then.

        A step that still lay there is given up; nothing of it is left but KV in its pages.
        """
        ...

    def resume(self) -> torch.Tensor | None:
        """Go on with the step that lies aside; as `start`.

        Raises RuntimeError if there is none.
        """
        ...

    def pause(self) -> None:
        """Have the `start` or `resume` that runs, or else the next one, return within a layer,
        unless its step is through by then. From any thread."""
        ...

    def unpause(self) -> None:
        """Take `pause` back. From any thread."""
        ...
