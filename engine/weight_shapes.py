"""The shape of every weight that a program refers to."""

from __future__ import annotations

from engine.architecture import Architecture


def weight_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """By canonical name, matrices as [out, in]; also of weights that this architecture leaves
    out."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (arch.vocab_size, arch.hidden_size),
        "head.weight": (arch.vocab_size, arch.hidden_size),
        "final_norm.weight": (arch.hidden_size,),
    }
    parts = {
        "query": (arch.query_size, arch.hidden_size),
        "key": (arch.kv_size, arch.hidden_size),
        "value": (arch.kv_size, arch.hidden_size),
        "output": (arch.hidden_size, arch.query_size),
        "gate": (arch.intermediate_size, arch.hidden_size),
        "up": (arch.intermediate_size, arch.hidden_size),
        "down": (arch.hidden_size, arch.intermediate_size),
    }
    hidden_norms = ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")
    for index in range(len(arch.layers)):
        for part, shape in parts.items():
            shapes[f"layers.{index}.{part}.weight"] = shape
            shapes[f"layers.{index}.{part}.bias"] = shape[:1]
        for norm in hidden_norms:
            shapes[f"layers.{index}.{norm}.weight"] = (arch.hidden_size,)
        for norm in ("query_norm", "key_norm"):
            shapes[f"layers.{index}.{norm}.weight"] = (arch.head_dim,)
    return shapes
