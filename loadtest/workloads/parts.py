"""Prompts made of parts, some of which other prompts have too."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from loadtest.plan import Turn
from loadtest.vocabulary import Vocabulary
from loadtest.workloads.base import Api
from loadtest.workloads.randomness import random_tokens
from loadtest.workloads.text import text


class Part(NamedTuple):
    """Parts of one name say the same, up to their length: in tokens, or in words of a chat, where
    `role` says whose message it stands in."""

    name: str
    length: int
    role: Literal["system", "user"] = "user"


def turn_of(
    parts: Sequence[Part],
    vocabulary: Vocabulary,
    *,
    api: Api,
    output_tokens: int,
    exact: bool,
    label: str = "all",
) -> Turn:
    """The parts one after the other; in a chat, neighbours of one role are one message."""
    if api == "chat":
        messages = tuple(
            {"role": role, "content": "\n\n".join(text(each.name, each.length) for each in run)}
            for role, run in groupby(parts, key=lambda part: part.role)
        )
        return Turn(output_tokens, messages=messages, label=label, exact=exact)
    tokens = array("I")
    for part in parts:
        tokens.extend(random_tokens(part.name, part.length, vocabulary))
    return Turn(output_tokens, tokens=tokens, label=label, exact=exact)
