"""Attention as the formula reads: one sequence, one float32 softmax at a time. For tests."""

from __future__ import annotations

import torch

from engine.attention.base import AttentionShape, StepIndex


def reference_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    index: StepIndex,
    shape: AttentionShape,
) -> torch.Tensor:
    """See `PagedAttention`. Slow and obvious, on purpose."""
    out = torch.empty_like(query)
    block_tokens = keys.shape[2]
    for row, length in enumerate(index.context_lengths):
        start, end = index.query_starts[row], index.query_starts[row + 1]
        blocks = index.block_tables[row, : -(-length // block_tokens)]
        key = _sequence_view(keys, blocks, length, shape).float()
        value = _sequence_view(values, blocks, length, shape).float()
        scores = torch.einsum("qhd,hkd->hqk", query[start:end].float(), key) * shape.scale
        hidden = hidden_keys(index.positions[start:end], length, shape.window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[start:end] = torch.einsum("hqk,hkd->qhd", weights, value).to(out.dtype)
    return out.flatten(1)


def hidden_keys(positions: torch.Tensor, keys: int, window: int | None) -> torch.Tensor:
    """Bool [len(positions), keys]: True where the key is in the future or behind the window."""
    columns = torch.arange(keys, device=positions.device)
    hidden = columns[None, :] > positions[:, None]
    if window is not None:
        hidden |= columns[None, :] <= positions[:, None] - window
    return hidden


def _sequence_view(
    pool: torch.Tensor, blocks: torch.Tensor, length: int, shape: AttentionShape
) -> torch.Tensor:
    """One sequence's keys (or values) for every query head: [heads, length, head_dim]."""
    tokens = pool[blocks].transpose(1, 2).flatten(0, 1)[:length]
    return tokens.repeat_interleave(shape.heads // shape.kv_heads, dim=1).transpose(0, 1)
