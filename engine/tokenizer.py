"""Text to token ids and back, exactly: one byte-pair tokenizer, with and without control tokens.

A definition in the `tokenizer.json` format goes in (a checkpoint's own, or one built from a GGUF
file by `engine.tokenizer_gguf`). Two tokenizers come of it: one that recognises control tokens
(special added tokens such as "<|im_end|>") in text, and one for which their strings are ordinary
text. Added tokens that are not special belong to the plain vocabulary of both.

Bytes are the truth about a token: text is always the UTF-8 reading of joined token bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import orjson
import tokenizers

from engine.alternatives import any_of
from engine.errors import ModelLoadError

_SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Encodes and decodes. Every method may be called from any thread.

    `identity` is the SHA-256 (hex) of the canonical definition: equal identities mean equal ids for
    equal text. `named_tokens` are the strings that chat templates know by role ("bos_token",
    "eos_token", ...). `vocab_size` is the highest id + 1.
    """

    def __init__(
        self,
        definition: Mapping[str, Any],
        *,
        path: Path,
        named_tokens: Mapping[str, str],
        add_bos: bool | None = None,
        rows: int | None = None,
    ) -> None:
        """`path` is named in errors. `add_bos` None: as the definition's post-processor says.

        `rows` is how many embeddings the model has: added tokens beyond them, which some text
        models inherit from their multimodal siblings, do not exist here. Raises ModelLoadError for
        a definition that is not byte-pair encoding over bytes, or whose vocabulary exceeds `rows`.
        """
        self._definition = _normalised(definition, path, rows)
        canonical = orjson.dumps(self._definition, option=orjson.OPT_SORT_KEYS)
        self._matching = _build(canonical, path)
        self._plain = _build(orjson.dumps(_without_control_tokens(self._definition)), path)
        self.named_tokens = dict(named_tokens)
        self.bos_token_id = self._id_of(named_tokens.get("bos_token"))
        self.eos_token_id = self._id_of(named_tokens.get("eos_token"))
        self._prompt_prefix = self._prefix_ids(add_bos)
        self._byte_level = _is_byte_level(self._definition, path)
        self._adds_prefix_space = _adds_prefix_space(self._definition)
        control = [token for token in self._definition["added_tokens"] if token["special"]]
        self._control_ids = frozenset(token["id"] for token in control)
        self._control_tokens = {token["content"]: token for token in control}
        self._added: dict[int, bytes] = {
            token["id"]: token["content"].encode() for token in self._definition["added_tokens"]
        }
        self.vocab_size = 1 + max(self._matching.get_vocab(with_added_tokens=True).values())
        self._bytes: dict[int, bytes] = {}
        prefix = orjson.dumps(self._prompt_prefix)
        self.identity = hashlib.sha256(prefix + b"\n" + canonical).hexdigest()
        self._most_bytes = self._most_text_bytes_of_one_token()
        self._unspellable = self._bytes_without_token()

    @cached_property
    def control_pattern(self) -> str:
        """A regular expression for the string of any control token, the longest at each place."""
        return any_of(self._control_tokens)

    @property
    def control_token_strings(self) -> frozenset[str]:
        """The strings of every control token."""
        return frozenset(self._control_tokens)

    def encode(self, text: str, *, control_tokens: bool) -> list[int]:
        """Ids of `text`, nothing added.

        `control_tokens` True reads the strings of control tokens as those tokens (text written by
        a template); False keeps them text (text written by a user).
        """
        return _encode(self._matching if control_tokens else self._plain, text)

    def encode_prompt(self, text: str, *, control_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt: begins with the BOS token if this model's prompts do.

        A raw prompt is the whole context, markers and all, so control tokens in it are read as
        such unless told otherwise; a BOS that the text already begins with is not doubled.
        """
        ids = self.encode(text, control_tokens=control_tokens)
        prefix = self._prompt_prefix
        return ids if prefix and ids[: len(prefix)] == prefix else prefix + ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Like `encode` with control tokens, except for those that contain or precede `mark`.

        `mark` is one character that says "whatever is spelled around here is text"; it is removed
        before encoding. The ids are those of `encode(text, control_tokens=True)` where no mark is.
        """
        ids: list[int] = []
        at, strip_left = 0, False
        for match in re.finditer(f"(?:{self.control_pattern})(?!{re.escape(mark)})", text):
            token = self._control_tokens[match[0]]
            segment = text[at : match.start()]
            segment = segment.rstrip() if token["lstrip"] else segment
            ids += self._encode_segment(segment, mark, at == 0, strip_left)
            ids.append(token["id"])
            at, strip_left = match.end(), token["rstrip"]
        return ids + self._encode_segment(text[at:], mark, at == 0, strip_left)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound on `len(encode(text))` at the cost of measuring the text.

        Text is as many tokens at least as its bytes need if every token is the longest there is:
        enough to refuse what is far too long before spending seconds on it. 0 where a normalizer
        makes even that uncertain.
        """
        encoded = text.encode().translate(None, self._unspellable)
        return -(-len(encoded) // self._most_bytes) if self._most_bytes else 0

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids` taken as a whole text.

        Bytes that are no UTF-8 become U+FFFD. Where `encode` puts a space before a text, the first
        space is taken off again. `skip_special` leaves control tokens out.
        """
        parts = (
            self._added[token] if token in self._control_ids else self.token_bytes(token)
            for token in ids
            if not (skip_special and token in self._control_ids)
        )
        text: str = b"".join(parts).decode(errors="replace")
        return text.removeprefix(" ") if self._adds_prefix_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes one token stands for; b"" for a control token and for an unused id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._bytes_of(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """One token for display: its text with U+FFFD for partial characters; control tokens by
        their own strings."""
        if token_id in self._control_ids:
            return self._added[token_id].decode()
        return self.token_bytes(token_id).decode(errors="replace")

    def is_control(self, token_id: int) -> bool:
        """Whether this is a control token, never shown as text."""
        return token_id in self._control_ids

    def token_id(self, text: str) -> int | None:
        """The id of the vocabulary entry with exactly this spelling, if there is one."""
        return self._id_of(text)

    def _id_of(self, text: str | None) -> int | None:
        found: int | None = None if text is None else self._matching.token_to_id(text)
        return found

    def _prefix_ids(self, add_bos: bool | None) -> list[int]:
        """What the post-processor puts before a text, or BOS or nothing as `add_bos` says."""
        if add_bos is not None:
            return [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        bare: list[int] = self._matching.encode("a", add_special_tokens=False).ids
        full: list[int] = self._matching.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start]
        return []

    def _encode_segment(self, text: str, mark: str, first: bool, strip_left: bool) -> list[int]:
        text = text.replace(mark, "")
        if strip_left:
            text = text.lstrip()
        if not text:
            return []
        return _encode(self._plain if first else self._plain_continued, text)

    @cached_property
    def _plain_continued(self) -> tokenizers.Tokenizer:
        """The plain tokenizer for text that does not open the prompt: no space is put before it
        where the definition wants one only at the very start."""
        if b'"first"' not in orjson.dumps(self._definition["pre_tokenizer"]):
            return self._plain
        plain = _without_control_tokens(self._definition)
        plain["pre_tokenizer"] = _never_prepend(plain["pre_tokenizer"])
        return _build(orjson.dumps(plain), None)

    def _most_text_bytes_of_one_token(self) -> int:
        """Bytes of text, before normalization, that one token can stand for; 0 for no limit."""
        shrink = _most_shrinking(self._definition["normalizer"])
        vocab = self._definition["model"]["vocab"]
        if self._byte_level:
            longest = max(map(len, vocab))  # one letter a byte
        else:
            longest = max(len(text.replace(_SPACE_MARK, " ").encode()) for text in vocab)
        return shrink * max(longest, *map(len, self._added.values()), 1)

    def _bytes_without_token(self) -> bytes:
        """Bytes that a byte-level vocabulary has no token for; encoding leaves them out."""
        if not self._byte_level:
            return b""
        vocab = self._definition["model"]["vocab"]
        return bytes(byte for letter, byte in _BYTE_OF_LETTER.items() if letter not in vocab)

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._control_ids:
            return b""
        if token_id in self._added:
            return self._added[token_id]
        text = self._matching.id_to_token(token_id) if token_id >= 0 else None
        if text is None:
            return b""
        if self._byte_level:
            return bytes(_BYTE_OF_LETTER[letter] for letter in text)
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes.fromhex(match[1])
        return text.replace(_SPACE_MARK, " ").encode()


def byte_letters() -> dict[int, str]:
    """The printable letter that stands for each byte in a byte-level vocabulary (GPT-2's table).

    Printable Latin-1 bytes stand for themselves, the others for letters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + index) for index, byte in enumerate(others)
    }


_BYTE_OF_LETTER = {letter: byte for byte, letter in byte_letters().items()}


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    # The batch call lets go of the GIL and computes no offsets; the single call does neither.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _build(definition: bytes, path: Path | None) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(definition)
    except Exception as error:  # the library raises nothing more specific
        raise ModelLoadError(f"{path}: not a usable tokenizer: {error}") from error


def _normalised(definition: Mapping[str, Any], path: Path, rows: int | None) -> dict[str, Any]:
    """The parts that matter for ids, in one form, without added tokens from id `rows` on.

    Control tokens match only as they are written, never through the normalizer: otherwise text
    that merely normalises to one would become one.
    """
    model = definition.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("vocab"), Mapping):
        raise ModelLoadError(f"{path}: tokenizer model has no vocabulary of byte pairs")
    if model.get("type", "BPE") != "BPE":
        raise ModelLoadError(f"{path}: tokenizer model {model['type']} is not supported (BPE is)")
    highest = max(model["vocab"].values(), default=-1)
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


def _without_control_tokens(definition: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer for which control tokens do not exist, neither as added tokens nor as
    something that merges could arrive at.

    The remaining added tokens move into the vocabulary, so that they keep their ids.
    """
    model = definition["model"]
    control = {token["content"] for token in definition["added_tokens"] if token["special"]}
    control.discard(
        model.get("unk_token")
    )  # the model needs it by name, though text cannot spell it
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


def _is_byte_level(definition: Mapping[str, Any], path: Path) -> bool:
    """True for byte-level vocabularies, False for SentencePiece ones with byte fallback."""
    kinds = set(_component_types(definition["decoder"]))
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    raise ModelLoadError(f"{path}: tokenizer decoder is neither ByteLevel nor ByteFallback")


def _adds_prefix_space(definition: Mapping[str, Any]) -> bool:
    """Whether encoding puts a space before a text, to be taken off when decoding."""
    return "Strip" in _component_types(definition["decoder"]) or any(
        part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never"
        for part in _components(definition["decoder"])
    )


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


def _never_prepend(component: dict[str, Any]) -> dict[str, Any]:
    """A pre-tokenizer with every Metaspace told to put no space before a text."""
    if component["type"] == "Metaspace":
        return component | {"prepend_scheme": "never"}
    if component["type"] == "Sequence":
        return component | {
            "pretokenizers": [_never_prepend(part) for part in component["pretokenizers"]]
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
