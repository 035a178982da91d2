"""A GGUF file's decoder: its architecture from metadata, its tensors under canonical names."""

from __future__ import annotations

import re
from functools import partial

import torch

from engine.architecture import Architecture, Layer, Rope
from engine.weights.fields import Fields
from engine.weights.gguf_file import GgufFile
from engine.weights.gguf_tensors import check_storage_types, read_rows
from engine.weights.rope import factored_rope, linear_rope, plain_rope, yarn_rope
from engine.weights.shapes import check_shapes
from engine.weights.stored import StoredWeight

_FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
_INTERLEAVED_ROPE = ("llama",)  # these files order q and k rows for rotation of adjacent pairs
_WINDOW_PERIOD = 6  # Gemma 3: every sixth layer sees everything; the files do not say so
_ROTATED = (".query.weight", ".query.bias", ".key.weight", ".key.bias")
_GEMMA_27B_LAYERS = 62  # the one Gemma 3 whose query scale is not its head size
_GLOBAL_NAMES = {
    "token_embd.weight": "embed.weight",
    "output_norm.weight": "final_norm.weight",
    "output.weight": "head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "attention_norm",
    "attn_q": "query",
    "attn_k": "key",
    "attn_v": "value",
    "attn_output": "output",
    "attn_q_norm": "query_norm",
    "attn_k_norm": "key_norm",
    "post_attention_norm": "attention_post_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "post_ffw_norm": "mlp_post_norm",
}
_BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


def gguf_architecture(file: GgufFile) -> Architecture:
    """The decoder that the metadata describes.

    Raises UnsupportedArchitectureError, naming it, for an architecture or feature that the decoder
    cannot express.
    """
    general = Fields(file.path, file.metadata)
    family = general.text("general.architecture")
    if family not in _FAMILIES:
        general.unsupported(
            f"architecture {family} is not supported (supported in GGUF: {', '.join(_FAMILIES)})"
        )
    if general.integer("split.count", 1) > 1:
        general.unsupported("a GGUF split into several files; merge them with gguf-split --merge")
    fields = Fields(file.path, file.metadata, f"{family}.")
    if fields.integer("expert_count", 0) > 0:
        general.unsupported(f"architecture {family} with experts (mixture of experts)")
    hidden, layers = fields.positive("embedding_length"), fields.positive("block_count")
    heads = _same_in_every_layer(fields, "attention.head_count")
    head_dim = fields.positive("attention.key_length", hidden // heads)
    if fields.positive("attention.value_length", head_dim) != head_dim:
        general.unsupported("keys and values of different sizes")
    gemma = family == "gemma3"
    scale_dim = hidden // heads if gemma and layers == _GEMMA_27B_LAYERS else head_dim
    return Architecture(
        family=family,
        vocab_size=_rows_of(file, "token_embd.weight"),
        hidden_size=hidden,
        intermediate_size=_same_in_every_layer(fields, "feed_forward_length"),
        heads=heads,
        kv_heads=_same_in_every_layer(fields, "attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=fields.positive("context_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        layers=_layers(fields, layers, alternating=gemma),
        ropes=_ropes(file, fields, head_dim, local=gemma),
        attention_scale=scale_dim**-0.5,
        activation="gelu_tanh" if gemma else "silu",
        embedding_scale=hidden**0.5 if gemma else 1.0,
        tied_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sandwich_norms=gemma,
    )


def gguf_weights(file: GgufFile, arch: Architecture) -> dict[str, StoredWeight]:
    """Every weight of `arch` by canonical name, checked for presence, shape and storage type.

    Readers keep using `file`, which must stay open.
    """
    check_storage_types(file)
    stored: dict[str, StoredWeight] = {}
    for tensor in file.tensors.values():
        if tensor.name == _ROPE_FACTORS:
            continue
        name = _canonical(tensor.name)
        order = None
        if arch.family in _INTERLEAVED_ROPE and name.endswith(_ROTATED):
            heads = arch.heads if ".query." in name else arch.kv_heads
            order = _half_split_rows(heads, arch.head_dim)
        stored[name] = StoredWeight(
            tensor.name, tensor.shape, partial(read_rows, file, tensor), order
        )
    found = {name: (weight.own_name, weight.shape) for name, weight in stored.items()}
    check_shapes(file.path, arch, found)
    return stored


def _canonical(name: str) -> str:
    if match := _BLOCK_TENSOR.fullmatch(name):
        index, part, kind = match.groups()
        if part in _BLOCK_NAMES:
            return f"layers.{index}.{_BLOCK_NAMES[part]}.{kind}"
    return _GLOBAL_NAMES.get(name, name)


def _half_split_rows(heads: int, head_dim: int) -> torch.Tensor:
    """Where each stored row belongs: pair i's two rows 2i, 2i + 1 go to i and i + head_dim / 2."""
    rows = torch.arange(heads * head_dim).view(heads, 2, head_dim // 2)
    return rows.transpose(1, 2).reshape(-1)


def _rows_of(file: GgufFile, name: str) -> int:
    tensor = file.tensors.get(name)
    if tensor is None:
        Fields(file.path, {}).unsupported(f"tensor {name} is missing")
    return tensor.shape[0]


def _same_in_every_layer(fields: Fields, key: str, default: int | None = None) -> int:
    """A count that the format allows to differ by layer; here it must not."""
    value = fields.raw(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            fields.unsupported(f"{key} differs between layers")
        return int(value[0])
    return fields.positive(key, default)


def _layers(fields: Fields, count: int, *, alternating: bool) -> tuple[Layer, ...]:
    key = "attention.sliding_window"
    window = fields.positive(key) if alternating or key in fields else None
    if not alternating:
        return (Layer(window=window, rope=0),) * count
    return tuple(
        Layer(window=None, rope=0) if (index + 1) % _WINDOW_PERIOD == 0 else Layer(window, rope=1)
        for index in range(count)
    )


def _ropes(file: GgufFile, fields: Fields, head_dim: int, *, local: bool) -> tuple[Rope, ...]:
    """The global rope and, for Gemma, the sliding layers' own."""
    rotary = fields.positive("rope.dimension_count", head_dim)
    if rotary != head_dim:
        fields.unsupported(f"rotation of {rotary} out of {head_dim} dims (partial rotary)")
    theta = fields.number("rope.freq_base", 1_000_000.0 if local else 10_000.0)
    ropes = [_global_rope(file, fields, theta, rotary)]
    if local:
        ropes.append(plain_rope(fields.number("rope.freq_base_swa", 10_000.0), rotary))
    return tuple(ropes)


def _global_rope(file: GgufFile, fields: Fields, theta: float, rotary: int) -> Rope:
    kind = fields.text("rope.scaling.type", "none")
    if factors := file.tensors.get(_ROPE_FACTORS):
        if factors.shape != (rotary // 2,):
            fields.unsupported(f"{_ROPE_FACTORS} of shape {list(factors.shape)}")
        return factored_rope(theta, rotary, read_rows(file, factors, 0, 1)[0].float())
    if kind == "none":
        return plain_rope(theta, rotary)
    factor = fields.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return linear_rope(theta, rotary, factor)
    if kind == "yarn":
        return yarn_rope(
            theta,
            rotary,
            factor=factor,
            original_positions=fields.positive("rope.scaling.original_context_length"),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    return fields.unsupported(f"rope scaling {kind}")
