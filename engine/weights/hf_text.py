"""The text side of a Hugging Face directory: tokenizer, template, what ends a sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from engine.errors import ModelLoadError
from engine.sampling_params import LEAST_REPETITION_PENALTY
from engine.tokenizer import Tokenizer
from engine.weights.fields import Fields

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_OLD_TEMPLATE = "chat_template.json"
_GENERATION = "generation_config.json"

IDENTITY_FILES = (CONFIG, TOKENIZER, _TOKENIZER_CONFIG, _TEMPLATE, _OLD_TEMPLATE)
"""Besides the weights, those whose bytes decide numbers or ids."""

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_SAMPLING_DEFAULTS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1.0, math.inf),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (LEAST_REPETITION_PENALTY, 10.0),
}
"""What a checkpoint may recommend, with the least and greatest value that makes sense."""


class HfText:
    """One directory's small files. Weights are neither needed nor looked at.

    `config` is the model's own configuration; empty if there is none. Every method raises
    ModelLoadError naming the file that is missing or malformed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = Fields(directory / CONFIG, read_json_if_there(directory / CONFIG))
        self._tokenizer_config = read_json_if_there(directory / _TOKENIZER_CONFIG)
        self._generation = Fields(
            directory / _GENERATION, read_json_if_there(directory / _GENERATION)
        )

    def embedding_rows(self) -> int | None:
        """How many token ids the model has, if its config says; a model of several modalities
        says so of its text part."""
        for config in (self.config, self.config.section("text_config")):
            if "vocab_size" in config:
                return config.positive("vocab_size")
        return None

    def tokenizer(self, rows: int | None) -> Tokenizer:
        """The directory's `tokenizer.json`, with the roles that `tokenizer_config.json` gives.

        `rows` is how many embeddings the model has, None if that is not known."""
        path = self.directory / TOKENIZER
        named = {}
        for role in _NAMED_TOKENS:
            value = self._tokenizer_config.get(role)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                named[role] = text
        add_bos = self._tokenizer_config.get("add_bos_token")
        return Tokenizer(
            read_json(path),
            path=path,
            named_tokens=named,
            add_bos=add_bos if isinstance(add_bos, bool) else None,
            rows=rows,
        )

    def chat_template(self) -> str | None:
        """The template's source: its own file first, else the tokenizer config's default one."""
        path = self.directory / _TEMPLATE
        if path.is_file():
            return _read_text(path)
        old = read_json_if_there(self.directory / _OLD_TEMPLATE).get("chat_template")
        template = old or self._tokenizer_config.get("chat_template")
        if isinstance(template, list):
            by_name = {each.get("name"): each.get("template") for each in template}
            template = by_name.get("default")
        return template if isinstance(template, str) else None

    def eos_token_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """All tokens that end a sequence, by the generation config (else the config) and by the
        tokenizer, which chat fine-tunes keep truer than the configs they inherit."""
        ends = _token_ids(self._generation) or _token_ids(self.config)
        own = tokenizer.eos_token_id
        return frozenset(ends if own is None else ends | {own})

    def generation_defaults(self) -> dict[str, float]:
        """What the checkpoint recommends for sampling; outside its range is a ModelLoadError."""
        return {
            key: self._generation.number(key, least=least, greatest=greatest)
            for key, (least, greatest) in _SAMPLING_DEFAULTS.items()
            if key in self._generation
        }


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object. Raises ModelLoadError naming it."""
    try:
        value = orjson.loads(_read_bytes(path))
    except ValueError as error:
        raise ModelLoadError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Like `read_json`; empty if there is no such file."""
    return read_json(path) if path.is_file() else {}


def _token_ids(fields: Fields) -> set[int]:
    value = fields.raw("eos_token_id")
    if isinstance(value, list):
        return {each for each in value if isinstance(each, int)}
    return set() if value is None else {fields.integer("eos_token_id")}


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
