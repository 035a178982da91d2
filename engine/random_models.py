"""Models of a real shape with random weights, for benches: timings depend on the shape alone."""

from __future__ import annotations

import torch

from engine.architecture import Architecture, Layer, Rope
from engine.decoder import weight_names
from engine.weight_shapes import weight_shapes

SHAPES = {  # hidden, intermediate, heads, kv heads, layers, vocabulary, rope's base
    "135m": (576, 1536, 9, 3, 30, 49_152, 1e5),
    "1b": (2048, 8192, 32, 8, 16, 128_256, 5e5),
    "8b": (4096, 14_336, 32, 8, 32, 128_256, 5e5),
}
"""SmolLM2-135M (the bundled model), Llama 3.2 1B, Llama 3.1 8B."""


def random_llama(shape: str, max_positions: int) -> Architecture:
    """One of `SHAPES` with room for so many positions."""
    hidden, intermediate, heads, kv_heads, layers, vocabulary, base = SHAPES[shape]
    head_dim = hidden // heads
    half = head_dim // 2
    return Architecture(
        family="llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=1e-5,
        layers=tuple(Layer(None, 0) for _ in range(layers)),
        ropes=(Rope(tuple(base ** (-i / half) for i in range(half))),),
        attention_scale=head_dim**-0.5,
        activation="silu",
        embedding_scale=1.0,
        tied_embeddings=shape != "8b",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sandwich_norms=False,
    )


def random_weights(
    arch: Architecture, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Every weight of `arch`, by canonical name; activations stay finite. They are made where they
    will be used: eight billion numbers take long on a CPU."""
    weights: dict[str, torch.Tensor] = {}
    shapes = weight_shapes(arch)
    for name in sorted(weight_names(arch)):
        shape = shapes[name]
        if len(shape) == 1:
            weights[name] = torch.ones(shape, device=device)
        else:
            weights[name] = torch.empty(shape, dtype=dtype, device=device)
            weights[name].normal_(0.0, shape[1] ** -0.5)
    return weights
