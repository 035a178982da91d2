"""Configuration keys that have a fixed name and no feature behind them yet.

Such a key is refused by name, unless its value says what forebay does without the feature ("none",
"off", 0, false, null): a file written for a later forebay never runs with half its meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.settings_errors import Path, did_you_mean, shown_key

_ANY = "[]"
_SWITCHED_OFF: tuple[Any, ...] = (None, False, 0, "off", "none")

_UNBUILT: tuple[tuple[str, ...], ...] = (
    ("models", _ANY, "quantize"),
    ("models", _ANY, "speculate", "method"),
)
_SECTIONS = frozenset({("models", _ANY, "speculate")})
"""Parents of unbuilt keys that have nothing else in them."""

REFUSAL = "not supported yet; leave it out"


def unbuilt_keys(path: Path) -> list[str]:
    """Names of the unbuilt keys in the section at `path`."""
    parent = _pattern(path)
    beneath = [key for key in _UNBUILT if key[: len(parent)] == parent and len(key) > len(parent)]
    return sorted({key[len(parent)] for key in beneath} - {_ANY})


def take_out_unbuilt(tree: dict[str, Any]) -> list[tuple[Path, str]]:
    """Remove every unbuilt key from `tree`, in place; returns the refusals as (path, message)."""
    refusals: list[tuple[Path, str]] = []
    for key in _UNBUILT:
        for holder, path in _holders(tree, key[:-1], ()):
            if key[-1] in holder and not _says_off(holder.pop(key[-1])):
                refusals.append(((*path, key[-1]), REFUSAL))
    for section in sorted(_SECTIONS):
        for holder, path in _holders(tree, section[:-1], ()):
            if section[-1] in holder:
                refusals += _leftovers(holder.pop(section[-1]), (*path, section[-1]))
    return refusals


def _holders(node: Any, key: tuple[str, ...], path: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    """Every mapping in the tree that `key` leads to."""
    if not key:
        if isinstance(node, dict):
            yield node, path
    elif key[0] == _ANY:
        if isinstance(node, list):
            for index, item in enumerate(node):
                yield from _holders(item, key[1:], (*path, index))
    elif isinstance(node, dict) and key[0] in node:
        yield from _holders(node[key[0]], key[1:], (*path, key[0]))


def _leftovers(content: Any, path: Path) -> list[tuple[Path, str]]:
    """What is wrong with a section that had only unbuilt keys, now that they are out of it."""
    if _says_off(content):
        return []
    if not isinstance(content, dict):
        return [(path, REFUSAL)]
    return [
        ((*path, shown_key(name)), "unknown key" + did_you_mean(name, unbuilt_keys(path)))
        for name in content
    ]


def _says_off(value: Any) -> bool:
    return value in _SWITCHED_OFF or value in ([], {}, "0", "false", "null")


def _pattern(path: Path) -> tuple[str, ...]:
    return tuple(_ANY if isinstance(part, int) else part for part in path)
