"""Which prefix is worth loading onto one more replica, before a queue forms for it.

A load costs little, a queue much, and arrivals tell of it before it is there. What is predicted is
waiting: on a replica that is busy for the share `u` of the time, `u**2 / (2 * (1 - u))` requests
wait on average, whatever each takes, where arrivals are independent and services alike (M/D/1;
Pollaczek and Khinchine's formula with Little's law). One more holder takes over part of the traffic.
The difference, over one horizon, is what a copy saves; what it costs is its load, and computing
again what it pushes out. It is worth it when it saves more than it costs, and that is all: with
nothing to save it is never made, and once made there is less to save.

The horizon is how far back arrivals are remembered: a prefix that has been hot for so long is taken
to stay so for as long again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Generic, Literal, TypeVar

from policies.cost import Coefficients
from policies.routing import Candidate

_MOST_DECAYS = 100.0
"""Weights are counted from a moving origin, which is moved before they outgrow a float."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning at which many prompts agree: the chain's link after its last block. A router
    sees one in each prompt: what the warmest replica has of it, as earlier prompts left it there."""

    link: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Load a prefix onto `target`. `source` is the lowest tier that something of it lies in."""

    prefix: Prefix
    source: Literal["dram", "redis"]
    target: str


class DecayingCounts(Generic[K]):
    """Sums that halve with time, of the at most `capacity` keys that have the largest.

    The space-saving algorithm (Metwally, Agrawal, El Abbadi 2005) with weights that decay: a new
    key takes the smallest one's place and its sum, so that a sum is never too small; what a key has
    inherited is known, and is left out of what `least` says, so that this is never too large.
    """

    def __init__(self, capacity: int, horizon_s: float) -> None:
        """After `horizon_s` what was added counts 1/e. Raises ValueError unless both are positive."""
        if capacity < 1 or horizon_s <= 0:
            raise ValueError("capacity and horizon_s must be positive")
        self._capacity = capacity
        self._horizon_s = horizon_s
        self._origin_s: float | None = None
        self._sums: dict[K, float] = {}
        self._inherited: dict[K, float] = {}
        self._smallest: list[tuple[float, int, K]] = []  # may be behind the sums, never ahead
        self._serial = 0

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, key: K, amount: float, now_s: float) -> K | None:
        """Count `amount` for `key`; the key that had to give way for it, if one had to."""
        gone = None
        weight = amount * self._weight(now_s)
        if key in self._sums:
            self._sums[key] += weight
            return None
        inherited = 0.0
        if len(self._sums) >= self._capacity:
            gone, inherited = self._drop_smallest()
        self._sums[key] = inherited + weight
        self._inherited[key] = inherited
        self._push(key)
        return gone

    def least(self, key: K, now_s: float) -> float:
        """What was added for `key`, decayed: at least so much."""
        if key not in self._sums:
            return 0.0
        return (self._sums[key] - self._inherited[key]) / self._weight(now_s)

    def rate(self, key: K, now_s: float) -> float:
        """`least` per second, over the horizon: too small for what has begun within it."""
        return self.least(key, now_s) / self._horizon_s

    def _weight(self, now_s: float) -> float:
        """How much more something that happens now counts than at the origin."""
        if self._origin_s is None:
            self._origin_s = now_s
        decays = (now_s - self._origin_s) / self._horizon_s
        if decays > _MOST_DECAYS:
            shrink = math.exp(-decays)
            for sums in (self._sums, self._inherited):
                for key in sums:
                    sums[key] *= shrink
            self._smallest.clear()
            for key in self._sums:
                self._push(key)
            self._origin_s, decays = now_s, 0.0
        return math.exp(decays)

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


@dataclass(slots=True)
class _Loading:
    """One prefix's copies under way and lately made: until when each target is left alone."""

    target: str | None = None
    until_s: float = 0.0
    tried: dict[str, float] = field(default_factory=dict)


class Warming:
    """Watches what is routed where, and proposes warm-ups. Single-threaded; time is an argument and
    never goes back.

    At most one warm-up per prefix is under way, and at most one per target; the same prefix is not
    proposed for the same target twice within a horizon, since that is what it was worth it for.
    """

    def __init__(self, *, horizon_s: float = 10.0, prefixes: int = 1024) -> None:
        """At most `prefixes` are watched, those with most arrivals.

        Raises ValueError unless both are positive.
        """
        self._horizon_s = horizon_s
        self._work = DecayingCounts[bytes](prefixes, horizon_s)
        self._busy: dict[str, DecayingCounts[None]] = {}
        self._loading: dict[bytes, _Loading] = {}
