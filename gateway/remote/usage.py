"""What a remote server says that an answer cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import orjson


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


def is_of_one_choice(answer: Mapping[str, object], usage: ReportedUsage) -> bool:
    """Whether a body, or a chunk, tells of one choice alone whatever others there are. llama.cpp
    does: it runs each choice as a task of its own, and gives its `timings` beside its usage."""
    timings = answer.get("timings")
    return isinstance(timings, dict) and timings.get("predicted_n") == usage.completion_tokens


def of_all_choices(told: Sequence[ReportedUsage], *, choices: int, prompts: int) -> ReportedUsage:
    """An answer's usage, of those of its choices as they are told one after another. A prompt
    counts once for all of its choices, and was cached as far as it was for the first of them."""
    per_prompt = max(1, choices // prompts)
    cached = [usage.cached_tokens for usage in told if usage.cached_tokens is not None]
    return _changed(
        told[-1],
        prompt_tokens=-(-sum(usage.prompt_tokens for usage in told) // per_prompt),
        completion_tokens=sum(usage.completion_tokens for usage in told),
        cached_tokens=min(cached) if prompts == 1 else sum(cached) // per_prompt,
    )


def estimated_for_all(
    first: ReportedUsage,
    choices: Sequence[object],
    *,
    max_tokens: int | None,
    prompts: int,
    prompt_tokens: int,
) -> ReportedUsage:
    """A whole answer's usage where only that of its first choice was told: the others' tokens are
    taken to be as long as its own, but never more than `max_tokens`. `prompt_tokens` is what all
    prompts together are known or taken to have."""
    sizes = [_size(choice) for choice in choices]
    each = [-(-first.completion_tokens * size // max(1, sizes[0])) for size in sizes]
    if max_tokens is not None:
        each = [min(tokens, max_tokens) for tokens in each]
    return _changed(
        first,
        prompt_tokens=first.prompt_tokens if prompts == 1 else prompt_tokens,
        completion_tokens=first.completion_tokens + sum(each[1:]),
        cached_tokens=first.cached_tokens or 0,
    )


def _changed(
    usage: ReportedUsage, *, prompt_tokens: int, completion_tokens: int, cached_tokens: int
) -> ReportedUsage:
    prompt_tokens = min(max(prompt_tokens, usage.prompt_tokens), _MOST_TOKENS)
    completion_tokens = min(completion_tokens, _MOST_TOKENS)
    cached_tokens = min(cached_tokens, prompt_tokens)
    details = usage.wire["prompt_tokens_details"]
    wire = {
        **usage.wire,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            **(details if isinstance(details, dict) else {}),
            "cached_tokens": cached_tokens,
        },
    }
    known = None if usage.cached_tokens is None else cached_tokens
    return ReportedUsage(prompt_tokens, completion_tokens, known, wire)


def _size(choice: object) -> int:
    """Bytes of what a choice says, at least one."""
    if not isinstance(choice, dict):
        return 1
    message = choice.get("message")
    if not isinstance(message, dict):
        return len(str(choice.get("text") or "").encode()) or 1
    said = [message.get("reasoning_content") or "", message.get("content") or ""]
    calls = message.get("tool_calls")
    return len("".join(map(str, said)).encode()) + (len(orjson.dumps(calls)) if calls else 0) or 1


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None
