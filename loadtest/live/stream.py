"""Reading a streamed answer as it comes: when which tokens, how it finished, what it cost.

The shape of the events is that of OpenAI's chat and text completions; `reasoning_content` and its
newer name `reasoning` are what servers of thinking models add to a delta.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Annotated, Any

import msgspec

from loadtest.record import Tiers
from loadtest.wire.events import EventSplitter
from loadtest.wire.refusal import error_message

_DONE = b"[DONE]"
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""Of tokens: what records can hold, and far more than any answer has."""


class ByTier(msgspec.Struct, gc=False):
    """Where forebay had cached tokens, if it says so."""

    device: _Count
    dram: _Count
    redis: _Count


class Details(msgspec.Struct, gc=False):
    """What a server says about a prompt's tokens."""

    cached_tokens: _Count | None = None
    cached_tokens_by_tier: ByTier | None = None


class Usage(msgspec.Struct, gc=False):
    """What a server says that an answer took. `cost_usd` is forebay's own: an exact decimal."""

    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    prompt_tokens_details: Details | None = None
    cost_usd: str | None = None

    @property
    def cached_tokens(self) -> int | None:
        """None if the server does not say."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens

    @property
    def tiers(self) -> Tiers | None:
        """None if the server does not say."""
        details = self.prompt_tokens_details
        if details is None or (by_tier := details.cached_tokens_by_tier) is None:
            return None
        return Tiers(by_tier.device, by_tier.dram, by_tier.redis)


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class StreamReader:
    """One streamed answer as far as it has come. Times are those that came with the pieces.

    `times_s` are the times of the events that brought output: text, thoughts, or a part of a call
    of a tool. `publish_s` is the first of them that a reader sees, so not a thought. `finish` is
    the finish reason, and `finish_s` when it came; `done` says that the stream said it was over.
    `broken` is one line about what was no event of an answer; nothing behind it is read.
    """

    __slots__ = (
        "_events",
        "_texts",
        "broken",
        "done",
        "finish",
        "finish_s",
        "publish_s",
        "times_s",
        "usage",
    )

    def __init__(self) -> None:
        self.times_s = array("d")
        self.publish_s: float | None = None
        self.finish: str | None = None
        self.finish_s: float | None = None
        self.usage: Usage | None = None
        self.done = False
        self.broken: str | None = None
        self._events = EventSplitter()
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """What a reader sees of it."""
        return "".join(self._texts)

    @property
    def first_s(self) -> float | None:
        """When the first token came. An answer whose tokens have no text, such as those of control
        tokens, came with its finish reason."""
        return self.times_s[0] if self.times_s else self.finish_s

    @property
    def last_s(self) -> float | None:
        """When the last token came: the finish reason may come with one that has no text."""
        last_s = self.times_s[-1] if self.times_s else None
        return last_s if self.finish_s is None else self.finish_s

    def gaps_s(self) -> array[float]:
        """The times between one piece of output and the next."""
        return array("d", [later_s - at_s for at_s, later_s in pairwise(self.times_s)])

    def take(self, at_s: float, data: bytes) -> None:
        """The next bytes, and when they came."""
        if self.broken is not None:
            return
        for payload in self._events.feed(data):
            if payload == _DONE:
                self.done = True
                continue
            try:
                chunk = _decode(payload)
            except (msgspec.DecodeError, RecursionError) as error:
                self.broken = f"an event is no chunk of an answer: {error}"
                return
            if chunk.error is not None:
                self.broken = f"error event: {error_message(chunk.error)}"
                return
            self._note(at_s, chunk)

    def _note(self, at_s: float, chunk: _Chunk) -> None:
        for choice in chunk.choices or ():
            delta = choice.delta
            text = choice.text if delta is None else delta.content
            visible = bool(text or (delta is not None and delta.tool_calls))
            if visible or (delta is not None and (delta.reasoning_content or delta.reasoning)):
                self.times_s.append(at_s)
            if visible and self.publish_s is None:
                self.publish_s = at_s
            if text:
                self._texts.append(text)
            if choice.finish_reason is not None:
                self.finish, self.finish_s = choice.finish_reason, at_s
        if chunk.usage is not None:
            self.usage = chunk.usage
