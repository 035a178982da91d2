"""A Hugging Face directory: config, safetensors in one or many files, tokenizer, template."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelLoadError
from engine.sampling_params import LEAST_REPETITION_PENALTY
from engine.tokenizer import Tokenizer
from engine.weights.fields import Fields
from engine.weights.hf_architecture import hf_architecture
from engine.weights.shapes import check_shapes, is_norm
from engine.weights.stored import StoredWeight

_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_OLD_TEMPLATE = "chat_template.json"
_GENERATION = "generation_config.json"
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
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_SAMPLING_DEFAULTS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1.0, math.inf),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (LEAST_REPETITION_PENALTY, 10.0),
}
"""What a checkpoint may recommend, with the least and greatest value that makes sense."""


class HfCheckpoint:
    """One checkpoint directory. Reading its config happens here, reading weights later.

    Every method raises ModelLoadError naming the file that is missing or malformed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._config = Fields(directory / _CONFIG, _read_json(directory / _CONFIG))
        self.architecture = hf_architecture(self._config)
        self._tokenizer_config = _read_json_if_there(directory / _TOKENIZER_CONFIG)
        self._generation = Fields(
            directory / _GENERATION, _read_json_if_there(directory / _GENERATION)
        )
        self._shards = _shards(directory)

    def identity_files(self) -> list[Path]:
        """Every file whose bytes decide numbers or ids."""
        names = (_CONFIG, _TOKENIZER, _TOKENIZER_CONFIG, _TEMPLATE, _OLD_TEMPLATE)
        extra = [self.directory / name for name in names if (self.directory / name).is_file()]
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

    def tokenizer(self) -> Tokenizer:
        """The directory's `tokenizer.json`, with the roles that `tokenizer_config.json` gives."""
        path = self.directory / _TOKENIZER
        named = {}
        for role in _NAMED_TOKENS:
            value = self._tokenizer_config.get(role)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                named[role] = text
        add_bos = self._tokenizer_config.get("add_bos_token")
        return Tokenizer(
            _read_json(path),
            path=path,
            named_tokens=named,
            add_bos=add_bos if isinstance(add_bos, bool) else None,
            rows=self.architecture.vocab_size,
        )

    def chat_template(self) -> str | None:
        """The template's source: its own file first, else the tokenizer config's default one."""
        path = self.directory / _TEMPLATE
        if path.is_file():
            return _read_text(path)
        old = _read_json_if_there(self.directory / _OLD_TEMPLATE).get("chat_template")
        template = old or self._tokenizer_config.get("chat_template")
        if isinstance(template, list):
            by_name = {each.get("name"): each.get("template") for each in template}
            template = by_name.get("default")
        return template if isinstance(template, str) else None

    def eos_token_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """All tokens that end a sequence, by the generation config (else the config) and by the
        tokenizer, which chat fine-tunes keep truer than the configs they inherit."""
        ends = _token_ids(self._generation) or _token_ids(self._config)
        own = tokenizer.eos_token_id
        return frozenset(ends if own is None else ends | {own})

    def generation_defaults(self) -> dict[str, float]:
        """What the checkpoint recommends for sampling; outside its range is a ModelLoadError."""
        return {
            key: self._generation.number(key, least=least, greatest=greatest)
            for key, (least, greatest) in _SAMPLING_DEFAULTS.items()
            if key in self._generation
        }

    def _canonical(self, name: str) -> str:
        names = _SANDWICH_NAMES if self.architecture.sandwich_norms else _BLOCK_NAMES
        if match := _BLOCK_TENSOR.fullmatch(name):
            index, part, kind = match.groups()
            if part in names:
                return f"layers.{index}.{names[part]}.{kind}"
        return _GLOBAL_NAMES.get(name, name)


def _token_ids(fields: Fields) -> set[int]:
    value = fields.raw("eos_token_id")
    if isinstance(value, list):
        return {each for each in value if isinstance(each, int)}
    return set() if value is None else {fields.integer("eos_token_id")}


def _shards(directory: Path) -> list[Path]:
    """The weight files: those the index names, else the one file."""
    index = directory / _INDEX
    if index.is_file():
        mapping = Fields(index, _read_json(index)).section("weight_map")
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(_read_bytes(path))
    except ValueError as error:
        raise ModelLoadError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object")
    return value


def _read_json_if_there(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}


def _read_text(path: Path) -> str:
    try:
        return _read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path}: not UTF-8") from error


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror or error}") from error
