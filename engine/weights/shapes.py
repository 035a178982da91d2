"""What shape every weight of an architecture must have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.architecture import Architecture
from engine.errors import ModelLoadError


def weight_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape, for exactly the names of `engine.decoder.weight_names(arch)`."""
    hidden, query, kv, inner = (
        arch.hidden_size,
        arch.query_size,
        arch.kv_size,
        arch.intermediate_size,
    )
    block: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (hidden,),
        "query.weight": (query, hidden),
        "key.weight": (kv, hidden),
        "value.weight": (kv, hidden),
        "output.weight": (hidden, query),
        "mlp_norm.weight": (hidden,),
        "gate.weight": (inner, hidden),
        "up.weight": (inner, hidden),
        "down.weight": (hidden, inner),
    }
    if arch.qkv_bias:
        block |= {"query.bias": (query,), "key.bias": (kv,), "value.bias": (kv,)}
    if arch.output_bias:
        block |= {"output.bias": (hidden,)}
    if arch.mlp_bias:
        block |= {"gate.bias": (inner,), "up.bias": (inner,), "down.bias": (hidden,)}
    if arch.qk_norm:
        block |= {"query_norm.weight": (arch.head_dim,), "key_norm.weight": (arch.head_dim,)}
    if arch.sandwich_norms:
        block |= {"attention_post_norm.weight": (hidden,), "mlp_post_norm.weight": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (arch.vocab_size, hidden),
        "final_norm.weight": (hidden,),
    }
    if not arch.tied_embeddings:
        shapes["head.weight"] = (arch.vocab_size, hidden)
    for index in range(len(arch.layers)):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in block.items()}
    return shapes


def check_shapes(
    path: Path, arch: Architecture, found: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Hold a checkpoint's tensors against the architecture before any of them is read.

    `found` maps canonical names to (the file's own name, shape). Raises ModelLoadError for the
    first tensor that is missing, unexpected or misshapen: a tensor left out would silently change
    the numbers.
    """
    if arch.heads % arch.kv_heads:
        raise ModelLoadError(
            f"{path}: {arch.heads} query heads cannot share {arch.kv_heads} key heads"
        )
    if arch.head_dim % 2:
        raise ModelLoadError(f"{path}: a head of {arch.head_dim} dims cannot be rotated")
    expected = weight_shapes(arch)
    for name, shape in expected.items():
        if name not in found:
            raise ModelLoadError(f"{path}: a {arch.family} model needs {name}, which is missing")
        own_name, own_shape = found[name]
        if own_shape != shape:
            raise ModelLoadError(
                f"{path}: tensor {own_name} has shape {list(own_shape)}, expected {list(shape)}"
            )
    for name, (own_name, _) in found.items():
        if name not in expected:
            raise ModelLoadError(
                f"{path}: tensor {own_name} has no place in a {arch.family} model of this config"
            )


def is_norm(name: str) -> bool:
    """Whether a canonical name is a norm's weight (kept in float32 whatever dtype is asked for)."""
    return name.endswith("norm.weight")
