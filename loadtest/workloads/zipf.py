"""Which of several things is asked for, some more often than others."""

from __future__ import annotations

import random
from itertools import accumulate


def zipf_shares(count: int, exponent: float) -> tuple[float, ...]:
    """How often each of `count` things is asked for: the k-th in proportion to k**-exponent, all
    the same for 0. They add up to 1."""
    weights = [rank**-exponent for rank in range(1, count + 1)]
    total = sum(weights)
    return tuple(weight / total for weight in weights)


class ZipfChoice:
    """Draws from 0 up to and without `count`, with the shares above."""

    def __init__(self, count: int, exponent: float, draw: random.Random) -> None:
        self._all = range(count)
        self._shares = list(accumulate(zipf_shares(count, exponent)))
        self._draw = draw

    def next(self) -> int:
        """The next one."""
        return self._draw.choices(self._all, cum_weights=self._shares)[0]
