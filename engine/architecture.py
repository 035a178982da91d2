"""The shape of a decoder: everything about a model but its numbers.

One frozen record covers the Llama family (Llama, SmolLM2, Mistral, Qwen2/2.5, Qwen3, Gemma 3
text). Loaders translate a checkpoint's own vocabulary into it; `engine.decoder` turns it into a
program; nothing after the loader asks which family a model came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding, half-split ("NeoX") style, already reduced to numbers.

    `inverse_frequencies` has `rotary_dims / 2` entries in radians per position, with any scaling
    rule (linear, llama3, yarn) already applied; `amplitude` multiplies cos and sin (yarn's mscale,
    else 1.0).
    """

    inverse_frequencies: tuple[float, ...]
    amplitude: float = 1.0


@dataclass(frozen=True, slots=True)
class Layer:
    """What may differ from one decoder layer to the next.

    `window` is the sliding window in tokens, the query itself included (None: full attention): a
    query at position p sees keys at positions > p - window. `rope` indexes `Architecture.ropes`.
    """

    window: int | None
    rope: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder's shape. Head and hidden sizes are in elements, `max_positions` in tokens."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    attention_scale: float
    activation: Activation
    embedding_scale: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sandwich_norms: bool

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head (GQA)."""
        return self.heads // self.kv_heads

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (or all value heads) together."""
        return self.kv_heads * self.head_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Stored key and value elements of one token over all layers."""
        return 2 * self.kv_size * len(self.layers)
