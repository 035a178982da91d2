"""The bytes of an answer: what chat and completions have in common.

A streamed chunk differs from its neighbours in a few characters only, so everything else is encoded
once per request and choice, and a token costs one JSON string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.sse import event, json_line
from gateway.text_choice import Delta, TokenEntry
from gateway.wire.usage import Usage

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, as in OpenAI's answers: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every chunk of one answer repeats. `created` is a Unix time in seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def as_wire(self, kind: str) -> dict[str, object]:
        """The leading fields of an answer whose `object` is `kind`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


@dataclass(frozen=True, slots=True)
class WholeChoice:
    """One finished choice of an answer that is not streamed."""

    index: int
    text: str
    entries: Sequence[TokenEntry]
    finish_reason: str


class ReplyFormat(Protocol):
    """How one endpoint writes its answers; made once per request."""

    def opening(self, index: int) -> bytes:
        """What a choice's stream starts with, once the engine has produced something for it."""
        ...

    def delta(self, index: int, delta: Delta) -> bytes:
        """The event that adds a delta's text and entries; its finish reason is `final`'s."""
        ...

    def final(self, index: int, finish_reason: str) -> bytes:
        """The event that ends a choice."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """The event with no choices and the usage, last of all."""
        ...

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class ChunkTemplate:
    """A stream's chunks around their changing middle.

    With usage asked for, every chunk but the last says `"usage":null`, as OpenAI's do.
    """

    def __init__(self, head: ReplyHead, kind: str, *, include_usage: bool) -> None:
        self._fields = head.as_wire(kind)
        start = json_line(self._fields)[:-1]
        self.prefix = b"data: " + start + b',"choices":[{"index":'
        self.suffix = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def usage(self, usage: Usage) -> bytes:
        """The chunk that only says what it cost."""
        return event({**self._fields, "choices": [], "usage": usage.as_wire()})


def wire_logprob(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return max(logprob, LEAST_LOGPROB)
