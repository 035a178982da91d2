"""What a streamed answer has said so far, whichever replicas said it.

A replica that is lost in the middle is replaced by another that gets the same request, seed
included. Whatever that one says must begin with what the client has got already, to the character;
that is passed over, and the client sees an answer that goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXTS = frozenset({"content", "reasoning_content", "reasoning", "refusal"})
_THOUGHTS = frozenset({"reasoning_content", "reasoning"})
_EMPTY: tuple[object, ...] = (None, "", [], {})


class AnswerDiffers(Exception):
    """The other replica's answer is not the one that the client has the beginning of."""


class ChoiceTranscript:
    """One choice: the text of each of its fields, its tool calls' among them.

    `said` maps a field to the pieces that went to the client; `grew` says whether the chunk that
    was taken last added any. While the choice is being said again, `_passed` counts the characters
    of each field that have come once more.
    """

    __slots__ = ("_delivered", "_opaque", "_passed", "finish_reason", "grew", "opened", "said")

    def __init__(self) -> None:
        self.said: dict[str, list[str]] = {}
        self.opened = False
        self.grew = False
        self.finish_reason: str | None = None
        self._opaque = False
        self._delivered: dict[str, str] | None = None
        self._passed: dict[str, int] = {}

    def rewind(self) -> None:
        """It will be said again from its beginning. Raises AnswerDiffers where what was said cannot
        be compared."""
        if self._opaque:
            raise AnswerDiffers
        self._delivered = {name: "".join(pieces) for name, pieces in self.said.items()}
        self.said = {name: [text] for name, text in self._delivered.items()}
        self._passed = {}
        if not self.opened and not self._delivered:
            self._delivered = None

    def pieces_of(self, name: str) -> list[str] | None:
        """The pieces of a field that has said something, to be added to by who knows that a chunk
        says nothing else; None while the choice is being said again."""
        return None if self._delivered is not None else self.said.get(name)

    def take(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """What of a chunk's choice is new, to be passed on; None if nothing is. Raises
        AnswerDiffers."""
        self.grew = False
        if self._delivered is None:
            self._record(choice)
            return choice
        return self._take_again(choice)

    def _record(self, choice: dict[str, Any]) -> None:
        self.opened = True
        delta = choice.get("delta")
        if type(delta) is dict:
            for name, value in delta.items():
                if type(value) is str:
                    if name in _TEXTS:
                        if value:
                            self._say(name, value)
                    elif name != "role" and value:
                        self._opaque = True
                elif name == "tool_calls" and type(value) is list:
                    for call in value:
                        self._record_call(call)
                elif value not in _EMPTY:
                    self._opaque = True
        text = choice.get("text")
        if type(text) is str and text:
            self._say("text", text)
        reason = choice.get("finish_reason")
        if type(reason) is str and reason:
            self.finish_reason = reason

    def _say(self, name: str, piece: str) -> None:
        self.grew = True
        pieces = self.said.get(name)
        if pieces is None:
            self.said[name] = [piece]
        else:
            pieces.append(piece)

    def _record_call(self, call: object) -> None:
        for name, piece in _call_pieces(call):
            self._say(name, piece)

    def _take_again(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        if self.finish_reason is not None:
            return None  # whole already; how often it says so is nobody's business
        new = dict(choice)
        is_new = False
        cut = False
        delta = choice.get("delta")
        if type(delta) is dict:
            kept: dict[str, Any] = {}
            for name, value in delta.items():
                if name in _TEXTS and type(value) is str:
                    rest = self._rest(name, value)
                    cut = cut or len(rest) < len(value)
                    if rest:
                        kept[name] = rest
                elif name == "tool_calls" and type(value) is list:
                    calls, calls_cut = self._rest_of_calls(value)
                    cut = cut or calls_cut
                    if calls:
                        kept[name] = calls
                elif name == "role":
                    if not self.opened:
                        kept[name] = value
                elif value not in _EMPTY:
                    raise AnswerDiffers
            is_new = bool(kept)
            new["delta"] = kept
        text = choice.get("text")
        if type(text) is str:
            rest = self._rest("text", text)
            cut = cut or len(rest) < len(text)
            is_new = is_new or bool(rest)
            new["text"] = rest
        if is_new and cut and choice.get("logprobs"):
            raise AnswerDiffers  # tokens are cut elsewhere than they were
        reason = choice.get("finish_reason")
        if type(reason) is str and reason:
            if not self._all_passed():
                raise AnswerDiffers
            self.finish_reason = reason
            is_new = True
        if is_new:
            self.opened = True
            if self._all_passed():
                self._delivered = None
        return new if is_new else None

    def _rest(self, name: str, piece: str) -> str:
        """What of a piece goes beyond what was delivered of this field."""
        delivered = (self._delivered or {}).get(name, "")
        passed = self._passed.get(name, 0)
        again = min(len(piece), len(delivered) - passed)
        if again > 0:
            if not delivered.startswith(piece[:again], passed):
                raise AnswerDiffers
            self._passed[name] = passed + again
            piece = piece[again:]
        if piece:
            self._say(name, piece)
        return piece

    def _rest_of_calls(self, calls: list[Any]) -> tuple[list[Any], bool]:
        """Of tool calls. One that the client knows keeps the id that it got first: ids are drawn
        anew each time."""
        delivered = self._delivered or {}
        kept: list[Any] = []
        cut = False
        for call in calls:
            index = _call_index(call)
            known = any(name.startswith(f"call {index} ") for name in delivered)
            rests = {name: self._rest(name, piece) for name, piece in _call_pieces(call)}
            cut = cut or any(len(rests[name]) < len(piece) for name, piece in _call_pieces(call))
            if not known:
                kept.append(call)
                continue
            function = {name.rpartition(" ")[2]: rest for name, rest in rests.items() if rest}
            if function:
                kept.append({"index": index, "function": function})
        return kept, cut

    def _all_passed(self) -> bool:
        return all(
            self._passed.get(name, 0) >= len(text) for name, text in (self._delivered or {}).items()
        )


class Transcript:
    """All choices of one answer."""

    def __init__(self, expected: int) -> None:
        """`expected` is how many choices the answer is to have."""
        self._expected = expected
        self._choices: dict[int, ChoiceTranscript] = {}

    @property
    def complete(self) -> bool:
        """Whether every choice that was asked for has its finish reason."""
        return len(self._choices) >= self._expected and self.all_finished

    @property
    def shows_text(self) -> bool:
        """Whether anything was said that is answer and not thought."""
        return any(not choice.said.keys() <= _THOUGHTS for choice in self._choices.values())

    @property
    def all_finished(self) -> bool:
        """Whether every choice that has begun, at least one, has its finish reason."""
        choices = self._choices.values()
        return bool(choices) and all(choice.finish_reason is not None for choice in choices)

    def choice(self, index: int) -> ChoiceTranscript:
        """One of them, from its first chunk on. Raises IndexError for one too many."""
        choice = self._choices.get(index)
        if choice is None:
            if not 0 <= index < max(self._expected, 1):
                raise IndexError(index)
            choice = self._choices[index] = ChoiceTranscript()
        return choice

    def rewind(self) -> None:
        """The answer will be said again from its beginning. Raises AnswerDiffers."""
        for choice in self._choices.values():
            choice.rewind()


def _call_index(call: object) -> int:
    index = call.get("index") if isinstance(call, Mapping) else None
    return index if type(index) is int else 0


def _call_pieces(call: object) -> list[tuple[str, str]]:
    """A tool call's name and arguments as fields of a choice: `call 0 arguments`."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return []
    index = _call_index(call)
    return [
        (f"call {index} {name}", function[name])
        for name in ("name", "arguments")
        if isinstance(function.get(name), str) and function[name]
    ]
