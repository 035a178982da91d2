"""The contract every torch attention keeps; the native executor is tested against it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one layer's attention needs to know beside its tensors. `scale` multiplies q.k."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None


@dataclass(frozen=True, slots=True)
class StepIndex:
    """Where a step's rows and pages lie, prepared once per step for all layers.

    The host tuples mirror `StepBatch`; the tensors live on the executor's device. `decodes` are the
    sequences with one query in this step, and the tensors called after them are theirs.
    """

    query_starts: tuple[int, ...]
    context_lengths: tuple[int, ...]
    block_tables: torch.Tensor  # int64 [S, longest]
    positions: torch.Tensor  # int64 [T]
    decodes: tuple[int, ...]
    decode_rows: torch.Tensor  # int64 [len(decodes)]
    decode_tables: torch.Tensor  # int64 [len(decodes), longest]


class PagedAttention(Protocol):
    """Causal attention of a step's queries over their sequences' pages."""

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        index: StepIndex,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Return [T, heads * head_dim] in the dtype of `query`.

        `query` is [T, heads, head_dim]. `keys` and `values` are one layer of the pool,
        [blocks, kv_heads, block_tokens, head_dim], and already hold this step's own tokens. A query
        at position p of its sequence sees positions <= p, and > p - window if there is a window.
        Slots past a sequence's context may hold anything finite and must not show; entries of a
        block table behind its last page name its first one.
        """
        ...
