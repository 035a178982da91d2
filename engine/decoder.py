"""The decoder, once: an architecture becomes a short program that every executor runs.

A program is a flat list of ops over named buffers and named weights. The torch executor runs it op
by op on any device; the native CPU executor hands the whole list to one C++ call per step, so that
no Python runs between two layers. Both read this file's list, so there is one definition of the
model.

Buffers (one row per token unless said otherwise; executors choose the storage dtype, the residual
stream is at least as precise as the weights):

    residual  [tokens, hidden]                 the stream every layer adds to
    normed    [tokens, hidden]                 a norm's output, a linear's input
    qkv       [tokens, query + 2 * kv]         fused projections; q and k rotated in place
    attended  [tokens, query]                  attention's output, heads concatenated
    delta     [tokens, hidden]                 a block's output before it joins the stream
    gate_up   [tokens, 2 * intermediate]       gate in the first half, up in the second
    gated     [tokens, intermediate]           activation(gate) * up
    selected  [logit rows, hidden]             the residual rows whose logits are asked for
    final     [logit rows, hidden]             the last norm's output
    logits    [logit rows, vocab]              always float32

Weights carry canonical names (see `weight_names`); a linear weight is [out, in], and a `Linear`
with several weights computes their outputs side by side. Norm weights are stored ready to multiply
(Gemma's "1 + w" is folded in by the loader).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.architecture import Activation, Architecture

Buffer = Literal[
    "residual",
    "normed",
    "qkv",
    "attended",
    "delta",
    "gate_up",
    "gated",
    "selected",
    "final",
    "logits",
]


@dataclass(frozen=True, slots=True)
class Embed:
    """residual = weight[token_ids] * scale."""

    weight: str
    scale: float


@dataclass(frozen=True, slots=True)
class Norm:
    """out = x / sqrt(mean(x^2) + eps) * weight, in float32 per row. `src` may be `out`."""

    src: Buffer
    weight: str
    out: Buffer


@dataclass(frozen=True, slots=True)
class Linear:
    """out = concat([src @ w.T for w in weights], -1) + concat(biases), if any biases."""

    src: Buffer
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    out: Buffer


@dataclass(frozen=True, slots=True)
class RotateAndStore:
    """Norm q and k per head if asked, rotate both in place in `qkv`, write k and v to the pages.

    A token at position p of a sequence lands in slot p % block_tokens of page
    block_table[p // block_tokens].
    """

    layer: int
    rope: int
    query_norm: str | None
    key_norm: str | None


@dataclass(frozen=True, slots=True)
class Attend:
    """Causal attention of q in `qkv` over the sequence's pages into `attended`.

    A query at position p sees keys at positions <= p, and > p - window where there is a window.
    """

    layer: int
    window: int | None
    scale: float


@dataclass(frozen=True, slots=True)
class Gate:
    """gated = activation(gate_up[:, :i]) * gate_up[:, i:]."""

    activation: Activation


@dataclass(frozen=True, slots=True)
class Add:
    """residual += delta."""


@dataclass(frozen=True, slots=True)
class Select:
    """selected = residual[logit_rows]."""


Op = Embed | Norm | Linear | RotateAndStore | Attend | Gate | Add | Select


@dataclass(frozen=True, slots=True)
class Program:
    """A decoder ready to run: its shape and its ops in order."""

    architecture: Architecture
    ops: tuple[Op, ...]


def build_program(arch: Architecture) -> Program:
    """Write the decoder of `arch` as ops. Pre-norm blocks; Gemma 3 also norms each block's output
    before it joins the stream (`sandwich_norms`)."""
    ops: list[Op] = [Embed("embed.weight", arch.embedding_scale)]
    for index in range(len(arch.layers)):
        ops += _attention_block(arch, index)
        ops += _mlp_block(arch, index)
    ops += [
        Select(),
        Norm("selected", "final_norm.weight", "final"),
        Linear("final", (head_weight_name(arch),), (), "logits"),
    ]
    return Program(arch, tuple(ops))


def head_weight_name(arch: Architecture) -> str:
    """The matrix that turns the last hidden state into logits."""
    return "embed.weight" if arch.tied_embeddings else "head.weight"


def weight_names(arch: Architecture) -> frozenset[str]:
    """Every canonical weight name that `build_program(arch)` refers to."""
    names: set[str] = set()
    for op in build_program(arch).ops:
        match op:
            case Embed(weight=weight) | Norm(weight=weight):
                names.add(weight)
            case Linear(weights=weights, biases=biases):
                names.update(weights, biases)
            case RotateAndStore(query_norm=query_norm, key_norm=key_norm):
                names.update(name for name in (query_norm, key_norm) if name)
            case _:
                pass
    return frozenset(names)


def _attention_block(arch: Architecture, index: int) -> list[Op]:
    layer, name = arch.layers[index], f"layers.{index}"
    ops: list[Op] = [
        Norm("residual", f"{name}.attention_norm.weight", "normed"),
        Linear(
            "normed",
            tuple(f"{name}.{part}.weight" for part in ("query", "key", "value")),
            tuple(f"{name}.{part}.bias" for part in ("query", "key", "value"))
            if arch.qkv_bias
            else (),
            "qkv",
        ),
        RotateAndStore(
            index,
            layer.rope,
            f"{name}.query_norm.weight" if arch.qk_norm else None,
            f"{name}.key_norm.weight" if arch.qk_norm else None,
        ),
        Attend(index, layer.window, arch.attention_scale),
        Linear(
            "attended",
            (f"{name}.output.weight",),
            (f"{name}.output.bias",) if arch.output_bias else (),
            "delta",
        ),
    ]
    if arch.sandwich_norms:
        ops.append(Norm("delta", f"{name}.attention_post_norm.weight", "delta"))
    return [*ops, Add()]


def _mlp_block(arch: Architecture, index: int) -> list[Op]:
    name = f"layers.{index}"
    ops: list[Op] = [
        Norm("residual", f"{name}.mlp_norm.weight", "normed"),
        Linear(
            "normed",
            (f"{name}.gate.weight", f"{name}.up.weight"),
            (f"{name}.gate.bias", f"{name}.up.bias") if arch.mlp_bias else (),
            "gate_up",
        ),
        Gate(arch.activation),
        Linear(
            "gated",
            (f"{name}.down.weight",),
            (f"{name}.down.bias",) if arch.mlp_bias else (),
            "delta",
        ),
    ]
    if arch.sandwich_norms:
        ops.append(Norm("delta", f"{name}.mlp_post_norm.weight", "delta"))
    return [*ops, Add()]
