"""The program run by torch, op by op: every device, no compiler needed, and the CUDA path."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as functional

from engine.architecture import Architecture
from engine.attention.base import AttentionShape, PagedAttention, StepIndex
from engine.attention.batched import batched_attention
from engine.decoder import (
    Add,
    Attend,
    Buffer,
    Embed,
    Gate,
    Linear,
    Norm,
    Op,
    Program,
    RotateAndStore,
    Select,
)
from engine.executors.base import Int32Array, StepBatch

_PAGE_LAYOUT = "layer-kv-head-token-dim"


def torch_bytes_per_block(arch: Architecture, dtype: torch.dtype, block_tokens: int) -> int:
    """Bytes of one block of KV over all layers in this executor's layout."""
    return arch.kv_elements_per_token * block_tokens * dtype.itemsize


class TorchExecutor:
    """Implements `engine.executors.base.Executor` with plain torch calls.

    The residual stream is float32, linears run in `dtype`. Weights are taken out of `weights` as
    they are fused and moved, so that no matrix lives twice.
    """

    name = "torch"
    kv_layout = _PAGE_LAYOUT

    def __init__(
        self,
        program: Program,
        weights: dict[str, torch.Tensor],
        *,
        device: torch.device,
        dtype: torch.dtype,
        blocks: int,
        block_tokens: int,
        attention: PagedAttention = batched_attention,
    ) -> None:
        self.device, self.dtype, self.block_tokens = device, dtype, block_tokens
        self._program = program
        self._attention = attention
        self._weights = _place(program, weights, device, dtype)
        arch = program.architecture
        self.pages = torch.zeros(
            blocks,
            torch_bytes_per_block(arch, dtype, block_tokens),
            dtype=torch.uint8,
            device=device,
        )
        # [blocks, layers, k|v, kv_heads, block_tokens, head_dim] over the same memory
        self._pool = self.pages.view(dtype).view(
            blocks, len(arch.layers), 2, arch.kv_heads, block_tokens, arch.head_dim
        )
        self._rotations = [
            _rotation_table(rope.inverse_frequencies, rope.amplitude, arch.max_positions, device)
            for rope in arch.ropes
        ]

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """See `Executor.forward`."""
        step = _Step(self, batch)
        for op in self._program.ops:
            step.run(op)
        if self.device.type == "cuda" and not len(batch.logit_rows):
            # Nobody reads what this step computed, yet its time is its own, not the next one's.
            torch.cuda.current_stream(self.device).synchronize()
        return step.buffers["logits"]

    def close(self) -> None:
        """See `Executor.close`."""
        self._weights.clear()


class _Step:
    """One forward pass: its buffers and its index, gone when the step is over."""

    def __init__(self, executor: TorchExecutor, batch: StepBatch) -> None:
        device = executor.device
        self._executor = executor
        self._arch = executor._program.architecture
        self.buffers: dict[Buffer, torch.Tensor] = {}
        self._token_ids = torch.from_numpy(batch.token_ids).to(device, torch.int64)
        self._logit_rows = torch.from_numpy(batch.logit_rows).to(device, torch.int64)
        decodes = np.flatnonzero(np.diff(batch.query_starts) == 1)
        tables = _own_pages_only(batch, executor.block_tokens)
        block_tables = torch.from_numpy(tables).to(device, torch.int64)
        self._index = StepIndex(
            query_starts=tuple(batch.query_starts.tolist()),
            context_lengths=tuple(batch.context_lengths.tolist()),
            block_tables=block_tables,
            positions=torch.from_numpy(batch.positions).to(device, torch.int64),
            decodes=tuple(decodes.tolist()),
            decode_rows=torch.from_numpy(batch.query_starts[decodes]).to(device, torch.int64),
            decode_tables=block_tables[torch.from_numpy(decodes).to(device)],
        )
        sequence_of_row = torch.repeat_interleave(
            torch.arange(len(self._index.context_lengths)),
            torch.from_numpy(batch.query_starts).to(torch.int64).diff(),
        ).to(device)
        positions, block_tokens = self._index.positions, executor.block_tokens
        self._row_blocks = self._index.block_tables[sequence_of_row, positions // block_tokens]
        self._row_slots = positions % block_tokens
        self._angles = [table[positions] for table in executor._rotations]

    def run(self, op: Op) -> None:
        buffers, weights = self.buffers, self._executor._weights
        match op:
            case Embed(weight=name, scale=scale):
                embedded = functional.embedding(self._token_ids, weights[name])
                buffers["residual"] = embedded.float() * scale
            case Norm(src=src, weight=name, out=out):
                normed = rms_norm(buffers[src], weights[name], self._arch.norm_eps)
                buffers[out] = normed
            case Linear(src=src, weights=names, biases=biases, out=out):
                bias = weights[_fused(biases)] if biases else None
                source = buffers[src].to(self._executor.dtype)
                result = functional.linear(source, weights[_fused(names)], bias)
                buffers[out] = result.float() if out == "logits" else result
            case RotateAndStore():
                self._rotate_and_store(op)
            case Attend():
                self._attend(op)
            case Gate(activation=activation):
                gate, up = buffers["gate_up"].chunk(2, dim=-1)
                act = functional.silu(gate) if activation == "silu" else gelu_tanh(gate)
                buffers["gated"] = act * up
            case Add():
                buffers["residual"] += buffers["delta"]
            case Select():
                buffers["selected"] = buffers["residual"][self._logit_rows]

    def _rotate_and_store(self, op: RotateAndStore) -> None:
        arch, weights = self._arch, self._executor._weights
        qkv, heads, kv_heads = self.buffers["qkv"], arch.heads, arch.kv_heads
        by_head = qkv.view(len(qkv), heads + 2 * kv_heads, arch.head_dim)
        turned = by_head[:, : heads + kv_heads]
        value = by_head[:, heads + kv_heads :]
        if op.query_norm or op.key_norm:
            query, key = turned[:, :heads], turned[:, heads:]
            if op.query_norm:
                query = rms_norm(query, weights[op.query_norm], arch.norm_eps)
            if op.key_norm:
                key = rms_norm(key, weights[op.key_norm], arch.norm_eps)
            turned = torch.cat((query, key), dim=1)
        turned = rotate(turned, self._angles[op.rope]).to(self._executor.dtype)
        self._query = turned[:, :heads]
        layer = self._executor._pool[:, op.layer]
        layer[self._row_blocks, :, :, self._row_slots] = torch.stack(
            (turned[:, heads:], value), dim=1
        )

    def _attend(self, op: Attend) -> None:
        arch, layer = self._arch, self._executor._pool[:, op.layer]
        shape = AttentionShape(arch.heads, arch.kv_heads, arch.head_dim, op.scale, op.window)
        self.buffers["attended"] = self._executor._attention(
            self._query, layer[:, 0], layer[:, 1], self._index, shape
        )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2, -1) + eps) * weight, computed and returned in float32."""
    return functional.rms_norm(x.float(), weight.shape, weight, eps)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by the tanh formula, as Gemma uses it."""
    return functional.gelu(x, approximate="tanh")


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split: x [T, heads, head_dim], angles [T, 2, head_dim / 2] (cos, sin).

    Returns float32.
    """
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat(
        (
            (first * cos).addcmul_(second, sin, value=-1),
            (second * cos).addcmul_(first, sin),
        ),
        dim=-1,
    )


def _rotation_table(
    inverse_frequencies: tuple[float, ...], amplitude: float, positions: int, device: torch.device
) -> torch.Tensor:
    """cos and sin of every position: float32 [positions, 2, rotary_dims / 2]."""
    frequencies = torch.tensor(inverse_frequencies, dtype=torch.float64)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return (torch.stack((angles.cos(), angles.sin()), dim=1) * amplitude).float().to(device)


def _own_pages_only(batch: StepBatch, block_tokens: int) -> Int32Array:
    """The block tables, with each sequence's first page for the entries behind its last one.

    Attention gathers as many pages for the short ones as for the longest. They have no weight, but
    in the pages of others there may be NaN.
    """
    used = -(-batch.context_lengths // block_tokens)
    columns = np.arange(batch.block_tables.shape[1])
    own = columns < used[:, None]
    return np.where(own, batch.block_tables, batch.block_tables[:, :1])


def _fused(names: tuple[str, ...]) -> str:
    return "+".join(names)


def _place(
    program: Program, weights: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Fuse what a `Linear` computes side by side and move everything to the device."""
    placed: dict[str, torch.Tensor] = {}

    def place(names: tuple[str, ...], to: torch.dtype) -> None:
        if names and _fused(names) not in placed:
            parts = [weights.pop(name).to(to) for name in names]
            placed[_fused(names)] = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(device)

    for op in program.ops:
        match op:
            case Embed(weight=name):
                place((name,), dtype)
            case Norm(weight=name):
                place((name,), torch.float32)
            case Linear(weights=names, biases=biases):
                place(names, dtype)
                place(biases, dtype)
            case RotateAndStore(query_norm=query_norm, key_norm=key_norm):
                place((query_norm,) if query_norm else (), torch.float32)
                place((key_norm,) if key_norm else (), torch.float32)
            case _:
                pass
    return placed
