"""Which keys come most often lately, in bounded memory."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

_MOST_DECAYS = 100.0
"""Weights grow from an origin in time, which is moved before they outgrow a float."""

K = TypeVar("K", bound=Hashable)


class HeavyHitters(Generic[K]):
    """Sums that decay with time, of at most `capacity` keys.

    The space-saving algorithm (Metwally, Agrawal, El Abbadi, ICDT 2005): a new key takes the place
    of the one with the smallest sum, and inherits it, so that no key's sum is too small and none
    whose share is above 1/capacity is missed. What was inherited is remembered and left out of
    `least`, which is never too large. Decay is forward: later amounts weigh more, which leaves the
    order of the keys as it is while nothing comes.
    """

    def __init__(self, capacity: int, horizon_s: float) -> None:
        """An amount counts 1/e after `horizon_s`. Raises ValueError unless both are positive."""
        if capacity < 1 or horizon_s <= 0:
            raise ValueError(f"must be positive: capacity {capacity}, horizon_s {horizon_s}")
        self._capacity = capacity
        self._horizon_s = horizon_s
        self._origin_s: float | None = None
        self._sums: dict[K, float] = {}
        self._inherited: dict[K, float] = {}
        self._smallest: list[tuple[float, int, K]] = []  # one entry per key, not above its sum
        self._serial = 0

    def __len__(self) -> int:
        return len(self._sums)

    def __contains__(self, key: K) -> bool:
        return key in self._sums

    def add(self, key: K, amount: float, now_s: float) -> K | None:
        """Count for `key`; the key that had to give way for it, if one had to. Time never goes
        back."""
        weight = amount * self._weight(now_s)
        if key in self._sums:
            self._sums[key] += weight
            return None
        gone, inherited = None, 0.0
        if len(self._sums) >= self._capacity:
            gone, inherited = self._drop_smallest()
        self._sums[key] = inherited + weight
        self._inherited[key] = inherited
        self._push(key)
        return gone

    def least(self, key: K, now_s: float) -> float:
        """What was counted for `key`, decayed: at least so much; 0 for one that is not here."""
        if key not in self._sums:
            return 0.0
        return (self._sums[key] - self._inherited[key]) / self._weight(now_s)

    def _weight(self, now_s: float) -> float:
        if self._origin_s is None:
            self._origin_s = now_s
        decays = (now_s - self._origin_s) / self._horizon_s
        if decays <= _MOST_DECAYS:
            return math.exp(decays)
        shrink = math.exp(-decays)
        for sums in (self._sums, self._inherited):
            for key in sums:
                sums[key] *= shrink
        self._smallest.clear()
        for key in self._sums:
            self._push(key)
        self._origin_s = now_s
        return 1.0

    def _push(self, key: K) -> None:
        self._serial += 1  # keys need not be comparable
        heapq.heappush(self._smallest, (self._sums[key], self._serial, key))

    def _drop_smallest(self) -> tuple[K, float]:
        while True:
            recorded, _, key = heapq.heappop(self._smallest)
            if recorded == self._sums[key]:
                del self._inherited[key]
                return key, self._sums.pop(key)
            self._push(key)  # it has grown since
