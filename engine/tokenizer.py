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
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
import tokenizers

from engine.alternatives import any_of
from engine.errors import ModelLoadError
from engine.tokenizer_definition import (
    BYTE_OF_LETTER,
    SPACE_MARK,
    adds_prefix_space,
    bytes_without_token,
    is_byte_level,
    most_text_bytes_of_a_token,
    never_prepend,
    normalised,
    prepends_at_start_only,
    without_control_tokens,
)

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
        definition = normalised(definition, path, rows)
        canonical = orjson.dumps(definition, option=orjson.OPT_SORT_KEYS)
        plain = without_control_tokens(definition)
        self._matching = _build(canonical, path)
        self._plain = _build(orjson.dumps(plain), path)
        # For text that does not open the prompt, where a space is put before the very start only.
        self._plain_continued = self._plain
        if prepends_at_start_only(plain):
            continued = plain | {"pre_tokenizer": never_prepend(plain["pre_tokenizer"])}
            self._plain_continued = _build(orjson.dumps(continued), path)
        self.named_tokens = dict(named_tokens)
        self.bos_token_id = self._id_of(named_tokens.get("bos_token"))
        self.eos_token_id = self._id_of(named_tokens.get("eos_token"))
        self._prompt_prefix = self._prefix_ids(add_bos)
        self._byte_level = is_byte_level(definition, path)
        self._adds_prefix_space = adds_prefix_space(definition)
        added = definition["added_tokens"]
        self._control_tokens = {token["content"]: token for token in added if token["special"]}
        self._control_ids = frozenset(token["id"] for token in self._control_tokens.values())
        self._added: dict[int, bytes] = {token["id"]: token["content"].encode() for token in added}
        self.vocab_size: int = 1 + max((*definition["model"]["vocab"].values(), *self._added))
        self._bytes: dict[int, bytes] = {}
        prefix = orjson.dumps(self._prompt_prefix)
        self.identity = hashlib.sha256(prefix + b"\n" + canonical).hexdigest()
        self._most_bytes = most_text_bytes_of_a_token(definition, byte_level=self._byte_level)
        self._unspellable = bytes_without_token(definition) if self._byte_level else b""

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

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._control_ids:
            return b""
        if token_id in self._added:
            return self._added[token_id]
        text = self._matching.id_to_token(token_id) if token_id >= 0 else None
        if text is None:
            return b""
        if self._byte_level:
            spelled = [BYTE_OF_LETTER.get(letter) for letter in text]
            # A filler entry such as "[unused 7]" is no spelling of bytes; it stands for itself.
            return (
                text.encode() if None in spelled else bytes(map(BYTE_OF_LETTER.__getitem__, text))
            )
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes.fromhex(match[1])
        return text.replace(SPACE_MARK, " ").encode()


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    # The batch call lets go of the GIL and computes no offsets; the single call does neither.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _build(definition: bytes, path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(definition)
    except Exception as error:  # the library raises nothing more specific
        raise ModelLoadError(f"{path}: not a usable tokenizer: {error}") from error
