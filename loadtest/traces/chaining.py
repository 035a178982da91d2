"""From a load back to a trace: what prompts share, found by what they say."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator

import orjson

from loadtest.plan import Load, Message, Session, Turn
from loadtest.trace import Trace, TraceRequest
from loadtest.traces.block_ids import BlockIds


def trace_of(load: Load, block_tokens: int, *, answer_s: float = 0.0) -> Trace:
    """The load's requests, their prompts cut into blocks of `block_tokens`.

    Token prompts are exact. In a chat every word and every mark counts as a token, a role as one
    too, and an answer is taken to be as long as it may be. A session's later turns come when think
    times have passed, and `answer_s` for each answer before them. All sessions of a closed loop
    begin at their `start_s`, which says nothing of how many run at a time.
    """
    blocks = BlockIds()
    lexicon = _Lexicon()
    requests = []
    for number, session in enumerate(load.sessions):
        at_s = session.start_s
        for place, (turn, tokens) in enumerate(_prompts(session, number, lexicon)):
            at_s += turn.think_s + (answer_s if place else 0.0)
            ids = blocks.of(_cut(tokens, block_tokens))
            requests.append(
                TraceRequest(at_s, len(tokens), turn.output_tokens, ids, session.tenant)
            )
    requests.sort(key=lambda request: request.at_s)
    return Trace(load.title, block_tokens, requests, load.tenants)


def _prompts(session: Session, number: int, lexicon: _Lexicon) -> Iterator[tuple[Turn, array[int]]]:
    """Each turn with its whole prompt. `number` keeps the answers of two sessions apart."""
    history = array("I")
    for place, turn in enumerate(session.turns):
        if turn.tokens is not None:
            yield turn, array("I", turn.tokens)
            continue
        for message in turn.messages:
            history.extend(lexicon.ids(_words(message)))
        head = lexicon.ids(_split(_text(dict(turn.fields)))) if turn.fields else array("I")
        yield turn, head + history
        answer = (f"{number} {place} {index}" for index in range(turn.output_tokens))
        history.extend(lexicon.ids(answer))


def _words(message: Message) -> Iterator[str]:
    """A role, then words and marks of what is said; what is no plain text as its JSON."""
    yield f"<{message['role']}>"
    content = message.get("content")
    rest = {name: value for name, value in message.items() if name not in ("role", "content")}
    yield from _split(content if isinstance(content, str) else _text(content))
    if rest:
        yield from _split(_text(rest))


_split = re.compile(r"\w+|[^\w\s]").findall


def _text(value: object) -> str:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def _cut(tokens: array[int], block_tokens: int) -> Iterator[bytes]:
    """The blocks' bytes; the last may be short."""
    whole = memoryview(tokens).cast("B")
    step = block_tokens * tokens.itemsize
    for start in range(0, len(whole), step):
        yield bytes(whole[start : start + step])


class _Lexicon:
    """A number for each word. A space within keeps an answer's words apart from all that are
    written: those have none."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def ids(self, words: Iterator[str] | list[str]) -> array[int]:
        numbers = self._numbers
        return array("I", [numbers.setdefault(word, len(numbers)) for word in words])
