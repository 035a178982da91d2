"""A Hugging Face `config.json` read as an architecture.

Both generations of the format are understood: `rope_theta` with `rope_scaling`, and
`rope_parameters`; a sliding-window pattern as a period, and `layer_types`.
"""

from __future__ import annotations

from engine.architecture import Activation, Architecture, Layer, Rope
from engine.weights.fields import Fields
from engine.weights.rope import linear_rope, llama3_rope, plain_rope, yarn_mscale, yarn_rope

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
_MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def hf_architecture(config: Fields) -> Architecture:
    """The decoder that the config describes; what it leaves out has the family's usual value.

    Raises UnsupportedArchitectureError, naming it, for an architecture or feature that the decoder
    cannot express, and ModelLoadError for a missing or malformed field.
    """
    family = _family(config)
    _refuse_features(config)
    gemma = family == "gemma3"
    hidden, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    head_dim = config.positive("head_dim", _usual_head_dim(family, hidden, heads))
    positions = config.positive("max_position_embeddings")
    ropes = (
        _gemma_ropes(config, head_dim) if gemma else (_rope(config, _flat_rope(config), head_dim),)
    )
    scale_dim = config.number("query_pre_attn_scalar", 256.0) if gemma else head_dim
    attention_bias = config.flag("attention_bias", False)
    return Architecture(
        family=family,
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.positive("intermediate_size"),
        heads=heads,
        kv_heads=config.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        max_positions=max(positions, _stretched_positions(config)),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        layers=_layers(config, family),
        ropes=ropes,
        attention_scale=scale_dim**-0.5,
        activation=_activation(config, gemma),
        # Exact here; a reference run at 16 bit rounds this factor to its own dtype first.
        embedding_scale=hidden**0.5 if gemma else 1.0,
        tied_embeddings=config.flag("tie_word_embeddings", gemma),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
    )


def _family(config: Fields) -> str:
    named = config.raw("architectures")
    if isinstance(named, list) and named:
        name, families = str(named[0]), _FAMILIES
    else:
        name, families = config.text("model_type"), _MODEL_TYPES
    if name not in families:
        config.unsupported(
            f"architecture {name} is not supported (supported: {', '.join(families)})"
        )
    return families[name]


def _refuse_features(config: Fields) -> None:
    """What would change the numbers and cannot be expressed."""
    if "quantization_config" in config:
        method = config.section("quantization_config").text("quant_method", "unnamed")
        config.unsupported(
            f"weights quantized by {method}; use an unquantized or a GGUF checkpoint"
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in config:
            config.unsupported(f"{key} is not supported")
    if config.flag("use_bidirectional_attention", False):
        config.unsupported("use_bidirectional_attention is not supported")


def _usual_head_dim(family: str, hidden: int, heads: int) -> int:
    return {"qwen3": 128, "gemma3": 256}.get(family, hidden // heads)


def _activation(config: Fields, gemma: bool) -> Activation:
    key = "hidden_activation" if gemma and "hidden_activation" in config else "hidden_act"
    name = config.text(key, "gelu_pytorch_tanh" if gemma else "silu")
    if name not in _ACTIVATIONS:
        config.unsupported(f"{key} {name} is not supported")
    return _ACTIVATIONS[name]


def _layers(config: Fields, family: str) -> tuple[Layer, ...]:
    count = config.positive("num_hidden_layers")
    kinds = _layer_kinds(config, family, count)
    window = config.positive("sliding_window") if _SLIDING in kinds else None
    local_rope = 1 if family == "gemma3" else 0
    return tuple(
        Layer(window, local_rope) if kind == _SLIDING else Layer(None, rope=0) for kind in kinds
    )


def _layer_kinds(config: Fields, family: str, count: int) -> list[str]:
    if family == "llama":
        return [_FULL] * count
    if family == "mistral":
        return [_SLIDING if "sliding_window" in config else _FULL] * count
    if family != "gemma3" and not config.flag("use_sliding_window", False):
        return [_FULL] * count
    if "layer_types" in config:
        kinds = config.strings("layer_types")
        if len(kinds) != count or not {*kinds} <= {_SLIDING, _FULL}:
            config.unsupported(f"layer_types must name {_SLIDING} or {_FULL} for {count} layers")
        return kinds
    if family == "gemma3":
        period = config.positive("sliding_window_pattern", 6)
        return [_SLIDING if (index + 1) % period else _FULL for index in range(count)]
    full = config.integer("max_window_layers", 28)
    return [_SLIDING if index >= full else _FULL for index in range(count)]


def _flat_rope(config: Fields) -> Fields:
    """One section with everything about the rope, from either generation of the format."""
    if "rope_parameters" in config:
        section = config.section("rope_parameters")
        return section if "rope_theta" in section else section.with_values(_theta(config))
    return config.section("rope_scaling").with_values(_theta(config))


def _theta(config: Fields) -> dict[str, float]:
    return {"rope_theta": config.number("rope_theta", 10_000.0)}


def _gemma_ropes(config: Fields, head_dim: int) -> tuple[Rope, Rope]:
    """(the full layers' rope, the sliding layers')."""
    if "rope_parameters" in config:
        both = config.section("rope_parameters")
        full, sliding = both.section(_FULL), both.section(_SLIDING)
    else:
        full, sliding = config.section("rope_scaling"), Fields(config.path, {})
    full_theta = full.number("rope_theta", config.number("rope_theta", 1_000_000.0))
    local_theta = sliding.number("rope_theta", config.number("rope_local_base_freq", 10_000.0))
    return (
        _rope(config, full.with_values({"rope_theta": full_theta}), head_dim),
        _rope(config, sliding.with_values({"rope_theta": local_theta}), head_dim),
    )


def _rope_kind(rope: Fields) -> str:
    return rope.text("rope_type", rope.text("type", "default"))


def _rope(config: Fields, rope: Fields, head_dim: int) -> Rope:
    kind, theta = _rope_kind(rope), rope.number("rope_theta")
    partial = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        config.unsupported(f"partial_rotary_factor {partial} is not supported")
    if kind == "default":
        return plain_rope(theta, head_dim)
    if kind == "linear":
        return linear_rope(theta, head_dim, rope.number("factor"))
    positions = config.positive("max_position_embeddings")
    original = rope.positive("original_max_position_embeddings", positions)
    if kind == "llama3":
        return llama3_rope(
            theta,
            head_dim,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_positions=original,
        )
    if kind == "yarn":
        factor = rope.number("factor", positions / original)
        return yarn_rope(
            theta,
            head_dim,
            factor=factor,
            original_positions=original,
            attention_factor=_yarn_amplitude(rope, factor),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
        )
    return config.unsupported(f"rope scaling {kind} is not supported")


def _yarn_amplitude(rope: Fields, factor: float) -> float | None:
    if "attention_factor" in rope:
        return rope.number("attention_factor")
    if "mscale" in rope and "mscale_all_dim" in rope:
        wanted, of_all = rope.number("mscale"), rope.number("mscale_all_dim")
        if wanted and of_all:
            return yarn_mscale(factor, wanted) / yarn_mscale(factor, of_all)
    return None


def _stretched_positions(config: Fields) -> int:
    """Yarn configs may keep the original context in `max_position_embeddings`; the model reaches
    factor times as far."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.section(key)
        if _SLIDING not in rope and _rope_kind(rope) == "yarn" and "factor" in rope:
            positions = config.positive("max_position_embeddings")
            original = rope.positive("original_max_position_embeddings", positions)
            return int(rope.number("factor") * original)
    return 0
