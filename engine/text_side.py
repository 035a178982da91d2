"""What a model's files say about text. Without torch: a gateway before remote models needs no more,
and torch alone would double its memory and the time that it takes to start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.chat_template import check_template
from engine.errors import ModelLoadError
from engine.tokenizer import Tokenizer
from engine.tokenizer_gguf import (
    gguf_expects_bos,
    gguf_named_tokens,
    gguf_tokenizer_definition,
)
from engine.weights.fields import Fields
from engine.weights.gguf_file import GgufFile
from engine.weights.hf_text import TOKENIZER, HfText, read_json

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


def load_text_side(path: Path, *, name: str) -> TextSide:
    """Read what `path` says about text, and no weights: the same as `load_model` gives, down to
    the tokenizer's identity, but for any architecture.

    `path` is a GGUF file, a directory with `tokenizer.json`, or such a file alone; what lies beside
    a file of that very name (template, named tokens, config) belongs to it. Raises ModelLoadError
    (one line, naming the file) for anything missing or malformed.
    """
    if path.is_dir():
        return hf_text_side(HfText(path), name)
    check_is_file(path)
    if path.name == TOKENIZER:
        return hf_text_side(HfText(path.parent), name)
    if path.suffix == ".json":
        tokenizer = Tokenizer(read_json(path), path=path, named_tokens={})
        return TextSide(name, tokenizer, chat_template=None, eos_token_ids=frozenset())
    with GgufFile(path) as file:
        return gguf_text_side(file, name)


def check_is_file(path: Path) -> None:
    """Raise ModelLoadError unless there is something that may be a model's one file."""
    if not path.exists():
        raise ModelLoadError(f"{path}: no such file or directory")
    if path.suffix == ".safetensors":
        raise ModelLoadError(f"{path}: give the directory that holds it and config.json")


def hf_text_side(text: HfText, name: str) -> TextSide:
    """A directory's, once its small files were read."""
    tokenizer = text.tokenizer(text.embedding_rows())
    template = text.chat_template()
    if template is not None:
        check_template(template, text.directory)
    return TextSide(
        name, tokenizer, template, text.eos_token_ids(tokenizer), text.generation_defaults()
    )


def gguf_text_side(file: GgufFile, name: str) -> TextSide:
    """A GGUF file's."""
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
