"""What a server's chunks have in common: all but a piece of text.

Most chunks of a stream differ from the one before in one string. Once it is known where that string
stands, a chunk needs neither be parsed nor written anew: bytes that begin and end like those of a
parsed chunk, with nothing between but characters that need no escape in JSON, can only be that
chunk with another text.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import orjson

from gateway.sse import event

_PLACE = "forebay-" + secrets.token_hex(12)
_PLACE_BYTES = _PLACE.encode()
_TEXT_KEYS = ("content", "text", "reasoning_content")


class Skeleton:
    """Such a chunk. `pieces` are those of the field that its text belongs to."""

    __slots__ = ("_after", "_before", "_between", "_out_after", "_out_before", "pieces")

    def __init__(
        self, before: bytes, after: bytes, out: tuple[bytes, bytes], pieces: list[str]
    ) -> None:
        self._before = before
        self._after = after
        self._out_before, self._out_after = out
        self._between = self._out_after + self._out_before
        self.pieces = pieces

    def take(self, events: Sequence[bytes], start: int, frames: bytearray) -> int:
        """How many chunks, from `start` on, differ in their texts alone. The client's events for
        them are added to `frames`, their texts to the pieces."""
        end = start
        while end < len(events) and events[end].startswith(self._before):
            end += 1
        texts = self._texts(events[start:end])
        if not texts:
            return 0
        if not _needs_no_escape(b" ".join(texts)):
            texts = list(takewhile(_needs_no_escape, texts))
            if not texts:
                return 0
        self.pieces.append(b"".join(texts).decode())
        frames += self._out_before
        frames += self._between.join(texts)
        frames += self._out_after
        return len(texts)

    def _texts(self, events: Sequence[bytes]) -> Sequence[bytes]:
        """Of events that begin like this one, those before the first that ends otherwise."""
        before, after = self._before, self._after
        # one search through all of them costs less than looking at each
        lines = b"\n".join(events) + b"\n"
        if lines.count(b"\n") != len(events):
            return ()  # one of several lines: it needs a closer look
        texts = lines[len(before) :].split(after + b"\n" + before)
        for at, text in enumerate(texts):
            if b"\n" in text:  # behind the last that is alike, at the latest
                text, ended, _ = text.partition(after + b"\n")
                return [*texts[:at], text] if ended and text and b"\n" not in text else texts[:at]
            if not text:
                return texts[:at]
        return texts


def _needs_no_escape(raw: bytes) -> bool:
    """Whether these bytes stand for themselves between the quotes of a JSON string, and hold no
    control characters nor what some clients take for the end of a line."""
    if b'"' in raw or b"\\" in raw:
        return False
    try:
        return raw.decode().isprintable()
    except UnicodeDecodeError:
        return False


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
        said = _with_text(chunk, name)
        said.pop("service_tier", None)  # the server's own; ours is in the head
        out_before, _, out_after = event({**said, **head}).partition(_PLACE_BYTES)
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
