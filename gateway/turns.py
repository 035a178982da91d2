"""Which message of a chat a token of its prompt belongs to, told from token ids alone.

Templates open every turn with a control token, and what users write never becomes one, so turns
can be counted in the ids: nothing has to be rendered again, and no text has to be kept. Templates
without such a token (`[INST]`, which opens user turns only) give no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from engine.errors import TemplateError
from gateway.served_model import ServedModel

_PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Place:
    """Token `token` of message `message`, both from 0; a message includes the tokens by which the
    template opens it. Message None: what the template puts before the first one."""

    message: int | None
    token: int


def turn_openers(model: ServedModel) -> frozenset[int]:
    """The control tokens that open user and assistant turns; empty where the template has none.

    Renders three short conversations: ask once per model.
    """
    template, tokenizer = model.chat_template, model.tokenizer
    if template is None:
        return frozenset()
    turns = [{"role": role, "content": _PROBE} for role in ("user", "assistant", "user")]
    now = datetime.now(UTC)
    try:
        rendered = [
            template.encode(turns[:count], now=now, add_generation_prompt=False)
            for count in (1, 2, 3)
        ]
    except TemplateError:
        return frozenset()
    openers: set[int] = set()
    for before, after in pairwise(rendered):
        if after[: len(before)] != before:
            return frozenset()
        turn = after[len(before) :]
        at = next((i for i, token in enumerate(turn) if tokenizer.is_control(token)), None)
        if at is None or _PROBE in tokenizer.decode(turn[:at]):
            return frozenset()
        openers.add(turn[at])
    return frozenset(openers)


def locate(
    token_ids: Sequence[int], position: int, messages: int, openers: frozenset[int]
) -> Place | None:
    """Where in a chat of so many messages, followed by the opening of an answer, a position is.

    None if it lies in that opening, and if the turns do not add up: the template may open one by
    another token, or print several for one message. Turns are counted from the end, since a
    template may put one of its own at the start.
    """
    if not openers or not 0 <= position < len(token_ids):
        return None
    head, tail = token_ids[: position + 1], token_ids[position + 1 :]
    behind = sum(tail.count(opener) for opener in openers)
    before = sum(head.count(opener) for opener in openers)
    # the opening of the answer is one more; the first turn may have an opener that is not known,
    # as a system message often has, or there may be a turn that the template put before it
    if not messages <= before + behind <= messages + 2:
        return None
    message = messages - behind
    if message >= messages:
        return None
    if message < 0:
        return Place(None, position)
    start = max(_last(head, opener) for opener in openers)
    return Place(message, position - max(start, 0))


def _last(tokens: Sequence[int], wanted: int) -> int:
    """The last index of a token, -1 if it is not there."""
    try:
        return len(tokens) - 1 - tokens[::-1].index(wanted)
    except ValueError:
        return -1
