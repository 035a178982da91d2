"""A Hugging Face directory with weights: config, safetensors in one or many files, text side."""

from __future__ import annotations

import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelLoadError
from engine.weights.fields import Fields
from engine.weights.hf_architecture import hf_architecture
from engine.weights.hf_text import CONFIG, IDENTITY_FILES, HfText, read_json
from engine.weights.shapes import check_shapes, is_norm
from engine.weights.stored import StoredWeight

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "final_norm.weight",
    "lm_head.weight": "head.weight",
}
_BLOCK_NAMES = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "output",
    "self_attn.q_norm": "query_norm",
    "self_attn.k_norm": "key_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
# The same word means the norm before the MLP in a pre-norm block and the norm after attention in
# Gemma's sandwich.
_SANDWICH_NAMES = _BLOCK_NAMES | {
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
_BLOCK_TENSOR = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)")
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")  # old checkpoints store what the config implies
_FLOATS = {"F32", "F16", "BF16"}


class HfCheckpoint:
    """One checkpoint directory. Reading its config happens here, reading weights later.

    Every method raises ModelLoadError naming the file that is missing or malformed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        config = directory / CONFIG
        if not config.exists():
            raise ModelLoadError(
                f"{config}: no such file; a model is a Hugging Face directory ({CONFIG}, "
                "*.safetensors, tokenizer.json) or a .gguf file"
            )
        self.architecture = hf_architecture(Fields(config, read_json(config)))
        self.text = HfText(directory)
        self._shards = _shards(directory)

    def identity_files(self) -> list[Path]:
        """Every file whose bytes decide numbers or ids."""
        small = (self.directory / name for name in IDENTITY_FILES)
        extra = [path for path in small if path.is_file()]
        return [*self._shards, *extra]

    def stored_weights(self, shards: ExitStack) -> dict[str, StoredWeight]:
        """Every weight by canonical name, checked for presence, shape and number type.

        The files stay open until `shards` closes; weights cannot be read afterwards.
        """
        stored: dict[str, StoredWeight] = {}
        for path in self._shards:
            for weight in _weights_of(path, shards):
                name = self._canonical(weight.own_name)
                if _DERIVED.fullmatch(weight.own_name) or (
                    name == "head.weight" and self.architecture.tied_embeddings
                ):
                    continue
                if name in stored:
                    raise ModelLoadError(f"{path}: tensor {weight.own_name} is stored twice")
                if self.architecture.family == "gemma3" and is_norm(name):
                    weight = StoredWeight(weight.own_name, weight.shape, weight.read, offset=1.0)
                stored[name] = weight
        found = {name: (weight.own_name, weight.shape) for name, weight in stored.items()}
        check_shapes(self.directory, self.architecture, found)
        return stored

    def _canonical(self, name: str) -> str:
        names = _SANDWICH_NAMES if self.architecture.sandwich_norms else _BLOCK_NAMES
        if match := _BLOCK_TENSOR.fullmatch(name):
            index, part, kind = match.groups()
            if part in names:
                return f"layers.{index}.{names[part]}.{kind}"
        return _GLOBAL_NAMES.get(name, name)


def _shards(directory: Path) -> list[Path]:
    """The weight files: those the index names, else the one file."""
    index = directory / _INDEX
    if index.is_file():
        mapping = Fields(index, read_json(index)).section("weight_map")
        names = sorted({str(name) for name in mapping.values()})
        for name in names:
            if Path(name).name != name:
                raise ModelLoadError(f"{index}: {name} is not a file name in this directory")
            if not (directory / name).is_file():
                raise ModelLoadError(f"{directory / name}: missing, though {_INDEX} names it")
        if not names:
            raise ModelLoadError(f"{index}: weight_map is empty")
        return [directory / name for name in names]
    if (directory / _ONE_FILE).is_file():
        return [directory / _ONE_FILE]
    if any(directory.glob("pytorch_model*.bin")):
        raise ModelLoadError(
            f"{directory}: has only pickled weights (.bin); safetensors are needed"
        )
    raise ModelLoadError(f"{directory}: neither {_ONE_FILE} nor {_INDEX} is there")


def _weights_of(path: Path, shards: ExitStack) -> list[StoredWeight]:
    """The tensors of one file. Opening it checks its header against its size."""
    try:
        # Typed as Any because its methods carry no types.
        file: Any = shards.enter_context(safe_open(path, framework="pt"))
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"{path}: truncated or not safetensors ({reason})") from error
    weights = []
    for name, stored in slices.items():
        if (kind := stored.get_dtype()) not in _FLOATS:
            raise ModelLoadError(
                f"{path}: tensor {name} is stored as {kind}; supported are F32, F16 and BF16"
            )
        shape = tuple(stored.get_shape())
        if not shape:
            raise ModelLoadError(f"{path}: tensor {name} is a single number")
        weights.append(StoredWeight(name, shape, partial(_read_rows, stored, len(shape))))
    return weights


def _read_rows(stored: Any, dimensions: int, start: int, stop: int) -> torch.Tensor:
    """Rows of a matrix; a vector is one row."""
    rows: torch.Tensor = stored[:].unsqueeze(0) if dimensions == 1 else stored[start:stop]
    return rows
