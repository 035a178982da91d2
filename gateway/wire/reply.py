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
    """What every chunk of one answer repeats. `created` is a Unix time in seconds. `service_tier`
    is what the request ran as, for a client that has asked for one; None: nothing is said of it."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | None = None

    def as_wire(self, kind: str) -> dict[str, object]:
        """The leading fields of an answer whose `object` is `kind`."""
        fields: dict[str, object] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }
        if self.service_tier is not None:
            fields["service_tier"] = self.service_tier
        return fields


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

    `before` and `after` are the bytes around a piece of text in its choice, as in
    `"delta":{"content":` and `}`. With usage asked for, every chunk but the last says
    `"usage":null`, as OpenAI's do.
    """

    def __init__(
        self, head: ReplyHead, kind: str, *, before: bytes, after: bytes, include_usage: bool
    ) -> None:
        self._fields = head.as_wire(kind)
        self._prefix = b"data: " + json_line(self._fields)[:-1] + b',"choices":[{"index":'
        self._before = before
        self._after = after
        self._suffix = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._plain_end = after + b',"logprobs":null,"finish_reason":null' + self._suffix
        self._starts: dict[int, bytes] = {}

    def piece(self, index: int, text: str, logprobs: object | None) -> bytes:
        """The chunk that adds text, always a string, to a choice."""
        start = self._starts.get(index)
        if start is None:
            start = self._starts[index] = b"%b%d,%b" % (self._prefix, index, self._before)
        content = json_line(text)
        if logprobs is None:
            return start + content + self._plain_end
        return b'%b%b%b,"logprobs":%b,"finish_reason":null%b' % (
            start,
            content,
            self._after,
            json_line(logprobs),
            self._suffix,
        )

    def bare(self, index: int, middle: bytes, finish_reason: str | None = None) -> bytes:
        """A chunk of a choice that says `middle` and no log-probabilities."""
        reason = b"null" if finish_reason is None else b'"%b"' % finish_reason.encode()
        return b'%b%d,%b,"logprobs":null,"finish_reason":%b%b' % (
            self._prefix,
            index,
            middle,
            reason,
            self._suffix,
        )

    def usage(self, usage: Usage) -> bytes:
        """The chunk that only says what it cost."""
        return event({**self._fields, "choices": [], "usage": usage.as_wire()})


def wire_logprob(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return max(logprob, LEAST_LOGPROB)
