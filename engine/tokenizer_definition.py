"""What a tokenizer definition (the `tokenizer.json` format) says, and the variants made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import orjson

from engine.errors import ModelLoadError

SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character


def byte_letters() -> dict[int, str]:
    """The printable letter that stands for each byte in a byte-level vocabulary (GPT-2's table).

    Printable Latin-1 bytes stand for themselves, the others for letters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + index) for index, byte in enumerate(others)
    }


BYTE_OF_LETTER = {letter: byte for byte, letter in byte_letters().items()}


def normalised(definition: Mapping[str, Any], path: Path, rows: int | None) -> dict[str, Any]:
    """The parts that matter for ids, in one form, without added tokens from id `rows` on.

    Control tokens match only as they are written, never through the normalizer: otherwise text
    that merely normalises to one would become one.
    """
    model = definition.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("vocab"), Mapping):
        raise ModelLoadError(f"{path}: tokenizer model has no vocabulary of byte pairs")
    if model.get("type", "BPE") != "BPE":
        raise ModelLoadError(f"{path}: tokenizer model {model['type']} is not supported (BPE is)")
    if not model["vocab"] or not all(isinstance(token, int) for token in model["vocab"].values()):
        raise ModelLoadError(f"{path}: tokenizer vocabulary must map strings to ids")
    highest = max(model["vocab"].values())
    if rows is not None and highest >= rows:
        raise ModelLoadError(f"{path}: token id {highest} has no row among {rows} embeddings")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        added = [
            {"id": token["id"], "content": token["content"]}
            | {flag: bool(token.get(flag, False)) for flag in flags}
            for token in definition.get("added_tokens") or ()
            if rows is None or token["id"] < rows
        ]
    except (KeyError, TypeError) as error:
        raise ModelLoadError(f"{path}: added_tokens is malformed") from error
    for token in added:
        token["normalized"] = token["normalized"] and not token["special"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": definition.get("normalizer"),
        "pre_tokenizer": definition.get("pre_tokenizer"),
        "post_processor": definition.get("post_processor"),
        "decoder": definition.get("decoder"),
        "model": dict(model),
    }


def without_control_tokens(definition: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer for which control tokens do not exist, neither as added tokens nor as
    something that merges could arrive at.

    The remaining added tokens move into the vocabulary, so that they keep their ids.
    """
    model = definition["model"]
    control = {token["content"] for token in definition["added_tokens"] if token["special"]}
    # The model needs its unknown token by name, though no text can spell it any more.
    control.discard(model.get("unk_token"))
    ordinary = [token for token in definition["added_tokens"] if not token["special"]]
    vocab = {text: token for text, token in model["vocab"].items() if text not in control}
    vocab |= {token["content"]: token["id"] for token in ordinary}
    unreachable = control | {model.get("unk_token")}
    merges = [merge for merge in model.get("merges", ()) if _merged(merge).isdisjoint(unreachable)]
    return dict(definition) | {
        "added_tokens": ordinary,
        "post_processor": None,
        "model": model | {"vocab": vocab, "merges": merges},
    }


def _merged(merge: str | Sequence[str]) -> set[str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return {left, right, left + right}


def is_byte_level(definition: Mapping[str, Any], path: Path) -> bool:
    """True for byte-level vocabularies, False for SentencePiece ones with byte fallback."""
    kinds = set(_component_types(definition["decoder"]))
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    raise ModelLoadError(f"{path}: tokenizer decoder is neither ByteLevel nor ByteFallback")


def adds_prefix_space(definition: Mapping[str, Any]) -> bool:
    """Whether encoding puts a space before a text, to be taken off when decoding."""
    return "Strip" in _component_types(definition["decoder"]) or any(
        part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never"
        for part in _components(definition["decoder"])
    )


def most_text_bytes_of_a_token(definition: Mapping[str, Any], *, byte_level: bool) -> int:
    """Bytes of text, before normalization, that one token can stand for; 0 for no limit."""
    vocab = definition["model"]["vocab"]
    if byte_level:
        longest = max(map(len, vocab))  # one letter a byte
    else:
        longest = max(len(text.replace(SPACE_MARK, " ").encode()) for text in vocab)
    added = (len(token["content"].encode()) for token in definition["added_tokens"])
    return _most_shrinking(definition["normalizer"]) * max(longest, *added, 1)


def bytes_without_token(definition: Mapping[str, Any]) -> bytes:
    """Bytes that a byte-level vocabulary has no token for; encoding leaves them out."""
    vocab = definition["model"]["vocab"]
    return bytes(byte for letter, byte in BYTE_OF_LETTER.items() if letter not in vocab)


def _most_shrinking(normalizer: Mapping[str, Any] | None) -> int:
    """How many times shorter in bytes a normalizer can make a text; 0 for any number of times."""
    if normalizer is None:
        return 1
    if normalizer["type"] == "NFC":
        return 3  # three Hangul letters compose into one; nothing composes further
    if normalizer["type"] == "Prepend" or normalizer.get("pattern") == {"String": " "}:
        return 1
    if normalizer["type"] == "Sequence":
        return prod(map(_most_shrinking, normalizer["normalizers"]))
    return 0


def prepends_at_start_only(definition: Mapping[str, Any]) -> bool:
    """Whether a space is put before the start of a whole text but not after a control token."""
    return b'"prepend_scheme":"first"' in orjson.dumps(definition["pre_tokenizer"])


def never_prepend(component: dict[str, Any]) -> dict[str, Any]:
    """A pre-tokenizer with every Metaspace told to put no space before a text."""
    if component["type"] == "Metaspace":
        return component | {"prepend_scheme": "never"}
    if component["type"] == "Sequence":
        return component | {
            "pretokenizers": [never_prepend(part) for part in component["pretokenizers"]]
        }
    return component


def _components(component: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """A decoder's parts, a sequence flattened."""
    if component is None:
        return []
    if component.get("type") == "Sequence":
        return [part for each in component["decoders"] for part in _components(each)]
    return [component]


def _component_types(component: Mapping[str, Any] | None) -> list[str]:
    return [part["type"] for part in _components(component)]
