"""What a remote server says that an answer cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class ReportedUsage(NamedTuple):
    """`cached_tokens` None: the server does not say. `wire` is what the client is told."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    wire: dict[str, object]


Priced = Callable[[ReportedUsage], ReportedUsage]
"""Adds what the answer costs to what the client is told."""


_MOST_TOKENS = (1 << 31) - 1
"""A count beyond this is none: sums of them are money, and must fit where that is kept."""


def read_usage(value: object) -> ReportedUsage | None:
    """A server's `usage`; None if it is none. What it says stays as it is, a zero too, but that
    `prompt_tokens_details.cached_tokens` is always an integer, and no more than `prompt_tokens`, of
    which it is a part."""
    if not isinstance(value, dict):
        return None
    prompt, completion = _count(value.get("prompt_tokens")), _count(value.get("completion_tokens"))
    if prompt is None:
        return None
    given = value.get("prompt_tokens_details")
    details = given if isinstance(given, dict) else {}
    cached = _count(details.get("cached_tokens"))
    if cached is not None:
        cached = min(cached, prompt)
    wire = {
        **value,
        "completion_tokens": completion or 0,
        "prompt_tokens_details": {**details, "cached_tokens": cached or 0},
    }
    wire.setdefault("total_tokens", prompt + (completion or 0))
    return ReportedUsage(prompt, completion or 0, cached, wire)


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None
