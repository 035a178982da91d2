"""From a server's events to the client's: our model's name, one id for the whole answer, usage as
the client asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.remote.body import RelayBody
from gateway.remote.failures import Cleaner, LossKind, UpstreamLost, judge_event
from gateway.remote.skeleton import Skeleton, learn, text_field
from gateway.remote.transcript import Transcript
from gateway.remote.usage import Priced, ReportedUsage, is_of_one_choice, of_all_choices, read_usage
from gateway.sse import DONE, event

_DONE_DATA = b"[DONE]"
_NO_DATA = b"null"
"""What a llama.cpp's stream of several prompts begins with."""
_LESSONS = 4
"""How many chunks to learn from: one is enough for most servers and choices, and some make every
chunk different."""
_SURELY_WRITTEN = 200
"""JSON nested no deeper than this can be written; more than that can be read."""
_HEAD = ("id", "object", "created", "model", "system_fingerprint")


class Chunks:
    """One streamed answer, over all replicas that work on it.

    `content_events` counts pieces of content that went to the client; servers make one per token,
    mostly.
    """

    def __init__(
        self,
        body: RelayBody,
        model: str,
        service_tier: str | None = None,
        priced: Priced | None = None,
    ) -> None:
        """`service_tier` is what the client is told, if anything: the server's own is not ours;
        `priced` adds the price to the usage, for a client that wants that."""
        self._priced = priced
        self._model = model
        self._service_tier = service_tier
        self._include_usage = body.include_usage
        self._continuous_usage = body.continuous_usage
        self._choices = body.choices
        self._prompts = body.prompts
        self._told: list[ReportedUsage] = []
        self._transcript = Transcript(body.choices)
        self._head: dict[str, Any] | None = None
        self._has_content = False
        self._said_done = False
        self._any_finished = False
        self._skeletons: list[Skeleton] = []
        self._lessons_left = _LESSONS
        self.usage: ReportedUsage | None = None
        self.content_events = 0

    @property
    def has_content(self) -> bool:
        """Whether any text went to the client."""
        return self._has_content

    @property
    def shows_text(self) -> bool:
        """Whether any of it was part of the answer, and not of the thoughts before it."""
        return self._transcript.shows_text

    @property
    def complete(self) -> bool:
        """Whether the client has the whole text: nothing but usage can follow."""
        if not self._any_finished:
            return False  # what is asked most
        if self._said_done:
            return self._transcript.all_finished
        return self._transcript.complete

    @property
    def said_done(self) -> bool:
        """Whether the server has said that its answer is over."""
        return self._said_done

    def begin_again(self) -> None:
        """Another replica starts from the beginning. Raises AnswerDiffers if what was said cannot
        be compared."""
        self._transcript.rewind()
        self._said_done = False
        self._skeletons.clear()
        self._lessons_left = _LESSONS
        self._told.clear()
        self.usage = None

    def take(self, events: Sequence[bytes], cleaner: Cleaner, frames: bytearray) -> None:
        """Add the client's events for these of the server's to `frames`: up to the one that fails,
        if one does.

        Raises UpstreamLost for what is no chunk and for an error that is the server's own, ApiError
        for one that is the client's, AnswerDiffers where a replay goes astray.
        """
        taken = 0
        while taken < len(events):
            alike = 0
            for skeleton in self._skeletons:
                alike = skeleton.take(events, taken, frames)
                if alike:
                    break
            if alike:
                self.content_events += alike
                taken += alike
            else:
                frames += self._take_one(events[taken], cleaner)
                taken += 1

    def _take_one(self, data: bytes, cleaner: Cleaner) -> bytes:
        """The client's event for one of the server's, empty for what is not for it."""
        if data == _DONE_DATA:
            self._said_done = True
            return b""
        if data == _NO_DATA:
            return b""
        chunk = _parse(data)
        choices = chunk.get("choices")
        if type(choices) is not list:
            if chunk.get("error") is not None:
                raise judge_event(chunk["error"], cleaner)
            if "usage" not in chunk:
                raise UpstreamLost(LossKind.GARBAGE, "no chunk")
            choices = []
        usage = chunk.get("usage")
        if usage is not None:
            self.usage = self._read_usage(chunk, usage)
        if not choices:
            return b""  # the usage goes out at the end
        kept = self._take_choices(choices)
        if not kept:
            return b""
        return self._framed(data, chunk, choices, kept)

    def ending(self) -> bytes:
        """The last events: the usage, if the client wants it and the server told, and [DONE]."""
        if not self._include_usage or self.usage is None:
            return DONE
        head = self._head or {}
        usage = self.usage if self._priced is None else self._priced(self.usage)
        return event({**head, "choices": [], "usage": usage.wire}) + DONE

    def _read_usage(self, chunk: dict[str, Any], usage: object) -> ReportedUsage | None:
        """What is known of the answer's usage with this one."""
        told = read_usage(usage)
        if told is None or self._choices == 1 or not is_of_one_choice(chunk, told):
            return told
        self._told.append(told)
        return of_all_choices(self._told, choices=self._choices, prompts=self._prompts)

    def _take_choices(self, choices: list[Any]) -> list[Any]:
        kept = []
        for choice in choices:
            index = choice.get("index", 0) if type(choice) is dict else None
            if type(index) is not int:
                raise UpstreamLost(LossKind.GARBAGE, "no choice")
            try:
                transcript = self._transcript.choice(index)
            except IndexError:
                raise UpstreamLost(LossKind.GARBAGE, "a choice too many") from None
            new = transcript.take(choice)
            if transcript.finish_reason is not None:
                self._any_finished = True
            if transcript.grew:
                self.content_events += 1
                self._has_content = True
            if new is not None:
                kept.append(new)
        return kept

    def _framed(
        self, data: bytes, chunk: dict[str, Any], choices: list[Any], kept: list[Any]
    ) -> bytes:
        head = self._head
        if head is None:
            head = {name: chunk[name] for name in _HEAD if name in chunk}
            head["model"] = self._model
            if self._service_tier is not None:
                head["service_tier"] = self._service_tier
            self._head = head
        if len(choices) == 1 and kept[0] is choices[0] and not self._told_usage(chunk):
            self._learn(data, chunk)
        chunk.pop("service_tier", None)
        chunk.update(head)
        chunk["choices"] = kept
        if "usage" in chunk:
            if not self._include_usage:
                del chunk["usage"]
            elif chunk["usage"] is not None:
                wire = self.usage.wire if self.usage is not None else None
                chunk["usage"] = wire if self._continuous_usage else None
        return event(chunk)

    def _told_usage(self, chunk: dict[str, Any]) -> bool:
        """Whether the chunk has a usage that must be taken out or put right."""
        return "usage" in chunk and (chunk["usage"] is not None or not self._include_usage)

    def _learn(self, data: bytes, chunk: dict[str, Any]) -> None:
        """Make the next chunks like this one cheaper."""
        choice = chunk["choices"][0]
        found = text_field(choice)
        if found is None or self._lessons_left == 0 or self._head is None:
            return
        self._lessons_left -= 1
        transcript = self._transcript.choice(choice.get("index", 0))
        pieces = transcript.pieces_of(found[0])
        if pieces is not None:
            skeleton = learn(data, chunk, self._head, pieces)
            if skeleton is not None:
                self._skeletons.append(skeleton)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise UpstreamLost(LossKind.GARBAGE, "no JSON") from None
    if type(chunk) is not dict:
        raise UpstreamLost(LossKind.GARBAGE, "no object")
    if data.count(b"[") + data.count(b"{") > _SURELY_WRITTEN:
        try:
            orjson.dumps(chunk)
        except orjson.JSONEncodeError:
            raise UpstreamLost(LossKind.GARBAGE, "nested too deep") from None
    return chunk
