"""Tiny random checkpoints, made on the fly: Hugging Face directories and GGUF files.

`tiny_checkpoint(family, directory)` writes what `save_pretrained` writes plus a tokenizer and a
template; `tiny_gguf(checkpoint, path)` writes the same weights as a GGUF file.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from engine.tokenizer_definition import byte_letters

FAMILIES = ("llama", "llama3-rope", "llama-yarn", "mistral", "qwen2", "qwen3", "gemma3")

CONTROL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
_WORDS = (b"th", b"the", b"in", b"ing", b" t", b" th", b" the", b"er", b"\xc3\xa9", b"\xe4\xb8")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer_definition() -> dict:
    """A byte-level tokenizer: three control tokens, every byte, a few merges."""
    letters = byte_letters()
    tokens = [*CONTROL_TOKENS, *(letters[byte] for byte in range(256))]
    merges = []
    for word in _WORDS:
        spelled = "".join(letters[byte] for byte in word)
        merges.append([spelled[:-1], spelled[-1]])
        tokens.append(spelled)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, text in enumerate(CONTROL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges,
        },
    }


VOCAB_SIZE = len(byte_tokenizer_definition()["model"]["vocab"]) + 3  # a few rows of padding


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_QWEN2_WINDOWS = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
_GEMMA3 = {"num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 24}
_FAMILY_SETTINGS: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, object]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama3-rope": (
        transformers.LlamaConfig,
        {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "llama-yarn": (
        transformers.LlamaConfig,
        {"rope_parameters": _YARN_ROPE, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": 24, "head_dim": 32}),
    "qwen2": (transformers.Qwen2Config, _QWEN2_WINDOWS | {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        _GEMMA3 | {"sliding_window": 24, "tie_word_embeddings": True},
    ),
}


def tiny_config(family: str, **changes: object) -> transformers.PretrainedConfig:
    """A config of one of `FAMILIES`: small enough for a test, odd enough to catch mixed-up sizes.

    `changes` replace single settings.
    """
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    kind, settings = _FAMILY_SETTINGS[family]
    return kind(**copy.deepcopy(shape | settings | changes))  # configs edit what they are given


def tiny_checkpoint(
    family: str,
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **changes: object,
) -> Path:
    """Write a random model of one of `FAMILIES` with tokenizer and template; the directory."""
    config = tiny_config(family, **changes)
    generator = torch.Generator().manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(0.15 * noise)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """The byte-level tokenizer's files."""
    (directory / "tokenizer.json").write_text(json.dumps(byte_tokenizer_definition()))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PLAIN = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
}


def tiny_gguf(
    checkpoint: Path,
    path: Path,
    *,
    matrices: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    **extra: object,
) -> Path:
    """Write a tiny checkpoint's weights as GGUF, as converters do: names, q and k order, norms.

    `matrices` is the storage type of every matrix. `extra` are more metadata (str, int, float or
    bool) or replace what stands there; dots are written as double underscores.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    family = {"mistral": "llama", "gemma3_text": "gemma3"}.get(
        config["model_type"], config["model_type"]
    )
    writer = gguf.GGUFWriter(path, family)
    metadata = _gguf_metadata(family, config)
    metadata |= {key.replace("__", "."): value for key, value in extra.items()}
    for key, value in metadata.items():
        _add_value(writer, key, value)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        own_name, tensor = _as_gguf(family, config, name, tensor.float())
        kind = matrices if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = tensor.numpy()
        if kind in _PLAIN:
            writer.add_tensor(own_name, tensor.to(_PLAIN[kind]).numpy())
        else:
            writer.add_tensor(own_name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_metadata(family: str, config: dict) -> dict[str, object]:
    definition = byte_tokenizer_definition()
    tokens = list(definition["model"]["vocab"])
    rope = config["rope_parameters"]
    metadata: dict[str, object] = {
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.embedding_length": config["hidden_size"],
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.feed_forward_length": config["intermediate_size"],
        f"{family}.attention.head_count": config["num_attention_heads"],
        f"{family}.attention.head_count_kv": config["num_key_value_heads"],
        f"{family}.attention.key_length": config["head_dim"]
        if "head_dim" in config
        else config["hidden_size"] // config["num_attention_heads"],
        f"{family}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{family}.rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in CONTROL_TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in definition["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    if family == "gemma3":
        metadata[f"{family}.attention.sliding_window"] = config["sliding_window"]
    return metadata


def _add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def _as_gguf(
    family: str, config: dict, name: str, tensor: torch.Tensor
) -> tuple[str, torch.Tensor]:
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if family == "gemma3" and name.endswith("norm.weight"):
        tensor = tensor + 1
    if name in plain:
        return plain[name], tensor
    _, _, index, *part, kind = name.split(".")
    inner = ".".join(part)
    names = _GGUF_NAMES | (
        {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
        if family == "gemma3"
        else {"post_attention_layernorm": "ffn_norm"}
    )
    if family == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config[
            "num_attention_heads" if inner == "self_attn.q_proj" else "num_key_value_heads"
        ]
        halves = tensor.numpy().reshape(heads, 2, tensor.shape[0] // heads // 2, -1)
        tensor = torch.from_numpy(np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape))
    return f"blk.{index}.{names[inner]}.{kind}", tensor


if __name__ == "__main__":
    tiny_checkpoint("llama", Path(sys.argv[1]))
