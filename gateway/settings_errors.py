"""What is wrong with a configuration, one line per mistake, never repeating a value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

Path = tuple[str | int, ...]
"""Where a value lies in the tree: ("models", 0, "dtype")."""

_KEY_NAME = re.compile(r"[A-Za-z_][A-Za-z_]{0,39}")


class ConfigError(Exception):
    """The configuration cannot be used. `messages` has one line per mistake, each naming the file
    and key, the environment variable or the flag at fault."""

    def __init__(self, messages: Sequence[str]) -> None:
        super().__init__("\n".join(messages))
        self.messages = tuple(messages)


class UnreadableConfigError(ConfigError):
    """The file is there and cannot be read now, whatever it says."""


def dotted(path: Iterable[str | int]) -> str:
    """("models", 0, "dtype") as `models[0].dtype`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def shown_key(name: object) -> str:
    """A key's name if it looks like one. Anything else might be a secret in the wrong place."""
    if isinstance(name, str) and _KEY_NAME.fullmatch(name):
        return name
    return "(a key that is not a plain word)"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`; did you mean port?`, or nothing when no known name is close."""
    close = nearest(name, known)
    return f"; did you mean {close}?" if close is not None else ""


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that is most like this one, None when none is close."""
    return next(iter(get_close_matches(str(name), list(known), n=1, cutoff=0.6)), None)


def locate(source: str, origins: Mapping[Path, str], path: Path) -> str:
    """How to name the value at `path`: the variable or flag that set it, else file and key."""
    for length in range(len(path), 0, -1):
        if origin := origins.get(path[:length]):
            return origin
    return f"{source}: {dotted(path)}" if path else source


def describe(error: Mapping[str, Any], known_keys: Iterable[str]) -> str:
    """One of pydantic's errors in an operator's words. `known_keys` are the keys at its place."""
    kind, context = error["type"], error.get("ctx", {})
    match kind:
        case "extra_forbidden":
            return "unknown key" + did_you_mean(error["loc"][-1], known_keys)
        case "missing":
            return "is required"
        case "literal_error" | "enum":
            return f"must be one of {context['expected'].replace(' or ', ', ')}"
        case "value_error":
            return str(context["error"])
        case "model_type" | "model_attributes_type" | "dict_type":
            return "must be a mapping of keys to values"
        case "list_type" | "tuple_type":
            return "must be a list"
        case "string_type":
            return "must be text"
        case "path_type":
            return "must be a path"
        case "string_too_short" | "too_short":
            return "must not be empty"
        case "greater_than_equal":
            return f"must be at least {_number(context['ge'])}"
        case "greater_than":
            return f"must be more than {_number(context['gt'])}"
        case "less_than":
            return f"must be less than {_number(context['lt'])}"
        case "less_than_equal":
            return f"must be at most {_number(context['le'])}"
        case _:
            return str(error["msg"])


def _number(bound: float) -> str:
    """A bound in full: 16777216, not 1.67772e+07."""
    return str(int(bound)) if bound == int(bound) else str(bound)
