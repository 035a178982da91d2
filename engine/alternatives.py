"""One regular expression for any of many strings, fast to search with."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias

_Tree: TypeAlias = "dict[str, _Tree]"
_END = ""


def any_of(strings: Iterable[str]) -> str:
    """A pattern for any of the strings, the longest that fits at a place.

    Shared beginnings are written once: a vocabulary has thousands of control strings that differ
    in their last digits, and trying them one by one at every "<" of a text takes seconds. Without
    any string the pattern matches nothing.
    """
    root: _Tree = {}
    for string in strings:
        node = root
        for letter in string:
            node = node.setdefault(letter, {})
        node[_END] = {}
    return _pattern(root) if root else "(?!)"


def _pattern(node: _Tree) -> str:
    branches = [re.escape(letter) + _pattern(rest) for letter, rest in node.items() if letter]
    if not branches:
        return ""
    if _END in node:
        return f"(?:{'|'.join(branches)})?"
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
