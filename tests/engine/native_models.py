"""Small random decoders and steps for testing the native executor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.architecture import Architecture, Layer, Rope
from engine.attention.reference import reference_attention
from engine.decoder import build_program, weight_names
from engine.executors.base import Executor, StepBatch
from engine.executors.native import NativeExecutor
from engine.executors.torch_executor import TorchExecutor
from engine.weight_shapes import weight_shapes

VOCAB = 83  # not a multiple of 16
BLOCKS = 48


def _rope(head_dim: int, base: float = 10000.0, amplitude: float = 1.0) -> Rope:
    half = head_dim // 2
    return Rope(tuple(base ** (-i / half) for i in range(half)), amplitude)


def architecture(**changes: object) -> Architecture:
    """Two layers of a Llama with grouped queries, changed as asked."""
    head_dim = int(changes.get("head_dim", 16))  # type: ignore[call-overload]
    plain = Architecture(
        family="test",
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=72,
        heads=6,
        kv_heads=2,
        head_dim=head_dim,
        max_positions=512,
        norm_eps=1e-5,
        layers=(Layer(None, 0), Layer(None, 0)),
        ropes=(_rope(head_dim),),
        attention_scale=head_dim**-0.5,
        activation="silu",
        embedding_scale=1.0,
        tied_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sandwich_norms=False,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def gemma_like() -> Architecture:
    """Everything that Llama has not, at once."""
    return architecture(
        layers=(Layer(20, 0), Layer(None, 1), Layer(70, 0)),
        ropes=(_rope(16), _rope(16, 1e6, amplitude=1.25)),
        activation="gelu_tanh",
        embedding_scale=48**0.5,
        qk_norm=True,
        sandwich_norms=True,
        attention_scale=0.3,
    )


ARCHITECTURES = {
    "grouped": architecture(),
    "multi_head": architecture(kv_heads=6),
    "multi_query": architecture(heads=20, kv_heads=1),
    "untied": architecture(tied_embeddings=False),
    "biases": architecture(qkv_bias=True, output_bias=True, mlp_bias=True),
    "window": architecture(layers=(Layer(24, 0), Layer(100, 0))),
    "qk_norm": architecture(qk_norm=True),
    "gemma_like": gemma_like(),
    "head_dim_8": architecture(head_dim=8),
    "head_dim_20": architecture(head_dim=20),
    "head_dim_64": architecture(head_dim=64, heads=4, hidden_size=96),
    "head_dim_256": architecture(head_dim=256, heads=2, kv_heads=1),
    "wide_mlp": architecture(intermediate_size=1104),  # longer than one stretch of a reduction
    "narrow_rope": architecture(ropes=(Rope((1.0, 0.1, 0.01)),), head_dim=6),
}


def random_weights(arch: Architecture, seed: int = 0) -> dict[str, torch.Tensor]:
    """Float32 weights, exactly representable in bfloat16, that keep activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    sizes = weight_shapes(arch)
    weights = {}
    for name in sorted(weight_names(arch)):
        shape = sizes[name]
        values = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            values *= shape[1] ** -0.5
        elif "norm" in name:
            values = 1 + 0.1 * values
        weights[name] = values.bfloat16().float()
    return weights


def open_native(
    arch: Architecture,
    dtype: torch.dtype = torch.float32,
    *,
    block_tokens: int = 16,
    blocks: int = BLOCKS,
    threads: int = 2,
    max_tokens: int = 16,
    share_prefixes: bool = True,
) -> NativeExecutor:
    """A native executor of `arch` with its random weights."""
    return NativeExecutor(
        build_program(arch),
        {name: value.to(dtype) for name, value in random_weights(arch).items()},
        dtype=dtype,
        blocks=blocks,
        block_tokens=block_tokens,
        threads=threads,
        max_tokens=max_tokens,
        share_prefixes=share_prefixes,
    )


def open_reference(arch: Architecture, *, block_tokens: int = 16) -> TorchExecutor:
    """The same numbers through torch in float32, attention as the formula reads."""
    return TorchExecutor(
        build_program(arch),
        random_weights(arch),
        device=torch.device("cpu"),
        dtype=torch.float32,
        blocks=BLOCKS,
        block_tokens=block_tokens,
        attention=reference_attention,
    )


@dataclass
class Sequence:
    """A sequence's ids, pages, and how far it has been computed."""

    ids: np.ndarray
    pages: list[int]
    computed: int = 0


def make_step(parts: list[tuple[Sequence, int]], *, every_row: bool = True) -> StepBatch:
    """A step that computes `count` more tokens of each sequence; logits of all or last rows."""
    starts, tokens, positions, contexts, rows = [0], [], [], [], []
    for sequence, count in parts:
        first, last = sequence.computed, sequence.computed + count
        tokens.append(sequence.ids[first:last])
        positions.append(np.arange(first, last))
        starts.append(starts[-1] + count)
        contexts.append(last)
        rows += range(starts[-2], starts[-1]) if every_row else [starts[-1] - 1]
        sequence.computed = last
    tables = np.zeros((len(parts), max(len(s.pages) for s, _ in parts)), dtype=np.int32)
    for row, (sequence, _) in enumerate(parts):
        tables[row, : len(sequence.pages)] = sequence.pages
    return StepBatch(
        token_ids=np.concatenate(tokens).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        query_starts=np.asarray(starts, dtype=np.int32),
        context_lengths=np.asarray(contexts, dtype=np.int32),
        block_tables=tables,
        logit_rows=np.asarray(rows, dtype=np.int32),
    )


def random_ids(count: int, seed: int) -> np.ndarray:
    """Token ids of the test vocabulary."""
    return np.random.default_rng(seed).integers(0, VOCAB, count).astype(np.int32)


def run_alone(
    executor: Executor, ids: np.ndarray, chunks: list[int], pages: list[int]
) -> torch.Tensor:
    """Logits of every position, one sequence computed in these chunks."""
    sequence = Sequence(ids, pages)
    parts = [executor.forward(make_step([(sequence, size)])).clone() for size in chunks]
    assert sequence.computed == len(ids)
    return torch.cat(parts)
