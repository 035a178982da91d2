"""What a server's chunks have in common: all but a piece of text.

Most chunks of a stream differ from the one before in one string. Once it is known where that string
stands, a chunk needs neither be parsed nor written anew: bytes that begin and end like those of a
parsed chunk, with nothing between but characters that need no escape in JSON, can only be that
chunk with another text.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import orjson

from gateway.sse import event

_PLACE = "forebay-" + secrets.token_hex(12)
_PLACE_BYTES = _PLACE.encode()
_TEXT_KEYS = ("content", "text", "reasoning_content")


class Skeleton:
    """Such a chunk. `pieces` are those of the field that its text belongs to."""

    __slots__ = ("_after", "_before", "_out_after", "_out_before", "_shortest", "pieces")

    def __init__(
        self, before: bytes, after: bytes, out: tuple[bytes, bytes], pieces: list[str]
    ) -> None:
        self._before = before
        self._after = after
        self._shortest = len(before) + len(after)
        self._out_before, self._out_after = out
        self.pieces = pieces

    def take(self, data: bytes) -> bytes | None:
        """The client's event for a chunk that differs in its text alone, whose text is added to the
        pieces; None for any other."""
        if (
            len(data) <= self._shortest
            or not data.startswith(self._before)
            or not data.endswith(self._after)
        ):
            return None
        raw = data[len(self._before) : len(data) - len(self._after)]
        if b'"' in raw or b"\\" in raw:
            return None
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            return None
        if not text.isprintable():  # control characters, and what some clients take for line ends
            return None
        self.pieces.append(text)
        return self._out_before + raw + self._out_after


def text_field(choice: Mapping[str, Any]) -> tuple[str, str] | None:
    """The field and the text of a chunk's choice that says a piece of text and nothing else."""
    if choice.get("finish_reason") is not None or choice.get("logprobs") is not None:
        return None
    delta = choice.get("delta")
    said = choice if delta is None else delta
    if type(said) is not dict or (delta is not None and len(delta) != 1):
        return None
    for name in _TEXT_KEYS:
        text = said.get(name)
        if type(text) is str and text:
            return name, text
    return None


def learn(
    data: bytes, chunk: dict[str, Any], head: Mapping[str, Any], pieces: list[str]
) -> Skeleton | None:
    """The skeleton of a chunk with one choice that says a piece of text and nothing else; the
    client gets it under `head`. None where the text's place cannot be told for certain."""
    found = text_field(chunk["choices"][0])
    if found is None:
        return None
    name, text = found
    raw = orjson.dumps(text)[1:-1]
    for colon in (b":", b": "):
        marker = b'"%b"%b"%b"' % (name.encode(), colon, raw)
        if data.count(marker) != 1:
            continue
        start = data.index(marker) + len(marker) - len(raw) - 1
        before, after = data[:start], data[start + len(raw) :]
        if not _is_the_place(before, after, chunk, name):
            return None
        out_before, _, out_after = event({**_with_text(chunk, name), **head}).partition(
            _PLACE_BYTES
        )
        return Skeleton(before, after, (out_before, out_after), pieces)
    return None


def _is_the_place(before: bytes, after: bytes, chunk: dict[str, Any], name: str) -> bool:
    """Whether other bytes there change the chunk's text, and that alone."""
    try:
        other = orjson.loads(before + _PLACE_BYTES + after)
    except orjson.JSONDecodeError:
        return False
    return bool(other == _with_text(chunk, name))


def _with_text(chunk: dict[str, Any], name: str) -> dict[str, Any]:
    choice = chunk["choices"][0]
    if "delta" in choice:
        return {**chunk, "choices": [{**choice, "delta": {name: _PLACE}}]}
    return {**chunk, "choices": [{**choice, name: _PLACE}]}
