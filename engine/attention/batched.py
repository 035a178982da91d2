"""Attention in a few large torch calls: all decodes of a step together, each prefill on its own.

The path for CUDA, and for CPUs without a compiler. Decode gathers pages into one padded batch and
multiplies unfused, which beats a fused kernel at one query per sequence; prefill goes to SDPA.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from engine.attention.base import AttentionShape, StepIndex
from engine.attention.reference import hidden_keys


def batched_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    index: StepIndex,
    shape: AttentionShape,
) -> torch.Tensor:
    """See `PagedAttention`."""
    starts = index.query_starts
    longest = max((index.context_lengths[s] for s in index.decodes), default=0)
    if len(index.decodes) == len(starts) - 1:
        tables = index.block_tables
        return _decode(query, keys, values, index.positions, tables, longest, shape).flatten(1)
    out = torch.empty_like(query)
    if index.decodes:
        rows = index.decode_rows
        out[rows] = _decode(
            query[rows], keys, values, index.positions[rows], index.decode_tables, longest, shape
        )
    for s in range(len(starts) - 1):
        first, last = starts[s], starts[s + 1]
        if last - first > 1:
            out[first:last] = _prefill(
                query[first:last], keys, values, index.positions[first:last],
                index.block_tables[s], index.context_lengths[s], shape,
            )  # fmt: skip
    return out.flatten(1)


def _decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    longest: int,
    shape: AttentionShape,
) -> torch.Tensor:
    """One query per sequence: [B, heads, head_dim] in and out."""
    batch = query.shape[0]
    key = _gather(keys, block_tables, longest)
    value = _gather(values, block_tables, longest)
    grouped = query.view(batch, shape.kv_heads, -1, shape.head_dim)
    scores = (grouped @ key.transpose(-1, -2)).float() * shape.scale
    hidden = hidden_keys(positions, longest, shape.window)
    weights = scores.masked_fill(hidden[:, None, None, :], float("-inf")).softmax(-1)
    return (weights.to(value.dtype) @ value).reshape(query.shape)


def _prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    length: int,
    shape: AttentionShape,
) -> torch.Tensor:
    """Many queries of one sequence, the last of its tokens: [Q, heads, head_dim] in and out."""
    key = _gather(keys, block_table[None], length)
    value = _gather(values, block_table[None], length)
    on_cuda = query.device.type == "cuda"
    if on_cuda and shape.window is None and query.dtype != torch.float32:
        # Here, because it takes all of torch's compiler along, a second that only CUDA has use for.
        from torch.nn.attention.bias import causal_lower_right

        mask: torch.Tensor = causal_lower_right(len(query), length)
    else:
        mask = ~hidden_keys(positions, length, shape.window)
        if on_cuda:
            # With a mask, the kernels that do without a matrix of all scores want as many heads.
            key = key.repeat_interleave(shape.heads // shape.kv_heads, dim=1)
            value = value.repeat_interleave(shape.heads // shape.kv_heads, dim=1)
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key,
        value,
        attn_mask=mask,
        scale=shape.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[0].transpose(0, 1)


def _gather(pool: torch.Tensor, block_tables: torch.Tensor, length: int) -> torch.Tensor:
    """Pages of several sequences side by side: [B, kv_heads, length, head_dim]."""
    block_tokens = pool.shape[2]
    pages = pool[block_tables[:, : -(-length // block_tokens)]]
    return pages.transpose(1, 2).flatten(2, 3)[:, :, :length]
