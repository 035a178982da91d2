"""Which sequence computes how many tokens in the next step, and who gives way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Rank(NamedTuple):
    """A sequence's place in line; the smaller goes first. `priority` before `arrival`."""

    priority: int
    arrival: int


def share_budget(budget_tokens: int, wanted_tokens: Sequence[int]) -> list[int]:
    """Tokens each running sequence computes this step, given in rank order.

    Decodes (one token wanted) are served before any prefill takes its chunk, so that a long prompt
    delays a running stream by at most one step's work; prefills then take what is left, first come
    first served. The sum never exceeds `budget_tokens`.
    """
    left = budget_tokens
    shares = [0] * len(wanted_tokens)
    for decodes in (True, False):
        for index, wanted in enumerate(wanted_tokens):
            if (wanted == 1) is decodes:
                shares[index] = min(wanted, left)
                left -= shares[index]
    return shares


def pick_victim(ranks: Sequence[Rank]) -> int:
    """Index of the running sequence that gives its pages back: least urgent, then newest.

    Raises ValueError when there is nobody to pick.
    """
    return max(range(len(ranks)), key=ranks.__getitem__)
