"""Which prefix is worth loading onto one more replica, before a queue forms for it.

A load costs little and a queue much, and arrivals tell of a queue before it is there. Where
arrivals are independent and services alike, a replica that is busy for the share `u` of its time
has `u**2 / (2 * (1 - u))` requests waiting on average, whatever one takes (M/D/1: the formula of
Pollaczek and Khinchine, with Little's law). One more holder takes over part of a prefix's work.
What waits less for that, over one horizon, is what the copy saves; what it costs is its load, and
computing again what it pushes out. It is made when it saves more than it costs, and there is no
other threshold: where nothing waits nothing is saved, and after one copy the next saves less.

The horizon is how far back arrivals are remembered. A prefix that has been asked for through all of
it is taken to be asked for as long again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from policies.cost import Coefficients
from policies.heavy_hitters import HeavyHitters
from policies.routing import Candidate

_LOOKS = 50
"""How often in a horizon one prefix is looked at, at most."""
_FORGOTTEN_HORIZONS = 20
"""After so many, nothing is left of what was counted."""


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A beginning that prompts agree in: the link of its last block, and its length. A router finds
    one in each prompt: as much of it as the warmest replica has, since earlier prompts left it
    there."""

    link: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Load a prefix onto a replica; `source` is the lowest tier that it has a part of it in."""

    prefix: HotPrefix
    source: Literal["dram", "redis"]
    target: str


@dataclass(slots=True)
class _Busy:
    """One replica's work and requests, decayed to `at_s`."""

    work_s: float = 0.0
    requests: float = 0.0
    at_s: float = 0.0


@dataclass(slots=True)
class _Watched:
    """A prefix: when to look at it again, until when a copy is under way, and until when the
    targets of earlier ones are left alone."""

    look_s: float
    under_way_s: float = -math.inf
    tried: dict[str, float] = field(default_factory=dict)


class Warming:
    """Watches what is routed where, and proposes warm-ups. Time is an argument and never goes back;
    not thread-safe.

    At most one warm-up per prefix is under way, and one per target; one whose end is not told is
    taken to be over after a horizon. The same prefix is not proposed for the same target twice
    within a horizon, which is what it was made for.
    """

    def __init__(self, *, horizon_s: float = 10.0, prefixes: int = 1024) -> None:
        """Watches at most `prefixes` prefixes, those that cause most work.

        Raises ValueError unless both are positive.
        """
        self._horizon_s = horizon_s
        self._work = HeavyHitters[bytes](prefixes, horizon_s)
        self._watched: dict[bytes, _Watched] = {}
        self._busy: dict[str, _Busy] = {}
        self._targets: dict[str, tuple[WarmUp, float]] = {}  # what is under way, until when at most

    @property
    def watched(self) -> int:
        """How many prefixes are watched."""
        return len(self._watched)

    def routed(self, prefix: HotPrefix | None, replica: str, work_s: float, now_s: float) -> None:
        """A request was sent to `replica`, and will occupy it for `work_s` (`occupied_s`). None:
        its prompt begins like no other."""
        busy = self._busy.get(replica)
        if busy is None:
            self._forget_gone(now_s)
            busy = self._busy[replica] = _Busy(at_s=now_s)
        self._decay(busy, now_s)
        busy.work_s += work_s
        busy.requests += 1.0
        if prefix is not None:
            gone = self._work.add(prefix.link, work_s, now_s)
            if gone is not None:
                del self._watched[gone]
            if prefix.link not in self._watched:
                self._watched[prefix.link] = _Watched(now_s + self._horizon_s / _LOOKS)

    def utilisation(self, replica: str, now_s: float) -> float:
        """The share of its time for which it is occupied by what was sent there lately; above 1
        where that is more than it can do. Too low for what began within the horizon."""
        busy = self._busy.get(replica)
        if busy is None:
            return 0.0
        self._decay(busy, now_s)
        return busy.work_s / self._horizon_s

    def propose(
        self, prefix: HotPrefix, candidates: Sequence[Candidate], now_s: float, random: Random
    ) -> WarmUp | None:
        """What to load where now, if anything; it counts as under way from here on.

        `candidates` are the model's replicas as they were for a prompt that begins with `prefix`
        and of which no replica has more. Only a replica that can load all of it, in less time than
        it could compute it, is a target: of those the one with least to do.
        """
        watched = self._watched.get(prefix.link)
        if watched is None or now_s < watched.look_s or now_s < watched.under_way_s:
            return None
        watched.look_s = now_s + self._horizon_s / _LOOKS
        holders, targets = [], []
        for candidate in candidates:
            if candidate.cached.device >= prefix.tokens:
                holders.append(self.utilisation(candidate.name, now_s))
            elif self._is_target(candidate, prefix, watched, now_s):
                targets.append((self.utilisation(candidate.name, now_s), candidate))
        if not holders or not targets:
            return None
        least = min(utilisation for utilisation, _ in targets)
        idlest = [candidate for utilisation, candidate in targets if utilisation == least]
        target = random.choice(idlest)
        work = self._work.least(prefix.link, now_s) / self._horizon_s
        saved_s = self._horizon_s * self._waiting_saved(holders, least, work)
        if saved_s <= _price_s(target, prefix.tokens):
            return None
        over_s = now_s + self._horizon_s
        warm_up = WarmUp(prefix, "redis" if target.cached.redis else "dram", target.name)
        watched.under_way_s = watched.tried[target.name] = over_s
        self._targets[target.name] = warm_up, over_s
        return warm_up

    def done(self, warm_up: WarmUp) -> None:
        """It is over, whether or not it worked. One that was taken to be over before is ignored."""
        under_way, _ = self._targets.get(warm_up.target, (None, 0.0))
        if under_way is not warm_up:
            return
        del self._targets[warm_up.target]
        if (watched := self._watched.get(warm_up.prefix.link)) is not None:
            watched.under_way_s = -math.inf

    def _is_target(
        self, candidate: Candidate, prefix: HotPrefix, watched: _Watched, now_s: float
    ) -> bool:
        name, cost, standing, cached = candidate
        if standing.full or cached.tokens < prefix.tokens:
            return False
        _, busy_until_s = self._targets.get(name, (None, now_s))
        if now_s < busy_until_s or now_s < watched.tried.get(name, now_s):
            return False
        computing_s = cost.prefill_s(prefix.tokens - cached.device, cached.device)
        return cost.load_s(cached.dram, cached.redis) < computing_s

    def _waiting_saved(self, holders: Sequence[float], target: float, work: float) -> float:
        """How many fewer requests would wait, on average, with the target as one more holder.

        The prefix's `work` (a utilisation, like the others) is shared evenly with it, unless that
        would make it busier than the others: routing sees to that.
        """
        count = len(holders)
        level = (sum(holders) - count * target) / (count + 1)
        moved = min(work / (count + 1), level)
        if moved <= 0:
            return 0.0
        served = sum(busy.requests for busy in self._busy.values())
        service_s = sum(busy.work_s for busy in self._busy.values()) / served
        most = self._horizon_s / service_s
        before = sum(_waiting(holder, most) for holder in holders) + _waiting(target, most)
        after = sum(_waiting(max(0.0, holder - moved / count), most) for holder in holders)
        return before - after - _waiting(target + moved, most)

    def _decay(self, busy: _Busy, now_s: float) -> None:
        left = math.exp((busy.at_s - now_s) / self._horizon_s)
        busy.work_s *= left
        busy.requests *= left
        busy.at_s = now_s

    def _forget_gone(self, now_s: float) -> None:
        """Replicas that nothing was sent to for long; they may not be there any more."""
        old_s = now_s - _FORGOTTEN_HORIZONS * self._horizon_s
        for name in [name for name, busy in self._busy.items() if busy.at_s < old_s]:
            del self._busy[name]
        for name in [name for name, (_, until_s) in self._targets.items() if until_s <= now_s]:
            del self._targets[name]


def occupied_s(
    cost: Coefficients, uncached_tokens: int, cached_tokens: int, answer_tokens: int
) -> float:
    """How long a request keeps a replica from others: its prefill, and its own part of the steps
    that it decodes in."""
    context = uncached_tokens + cached_tokens + answer_tokens // 2
    row_s = cost.token_s + cost.sequence_s + (cost.attended_s + cost.context_read_s) * context
    return cost.prefill_s(uncached_tokens, cached_tokens) + answer_tokens * row_s


def _waiting(utilisation: float, most: float) -> float:
    """How many requests wait on average where `most` can be served in a horizon. The formula's
    steady state is out of reach when less than one of them is to spare; of what is above that, half
    waits on average while it piles up."""
    reachable = min(utilisation, most / (most + 1.0))
    above = utilisation - reachable
    return reachable * reachable / (2.0 * (1.0 - reachable)) + above * most / 2.0


def _price_s(target: Candidate, tokens: int) -> float:
    """A copy's cost: loading what the target lacks on its device, and computing as much again for
    whoever misses what it pushes out."""
    cached = target.cached
    lacking = max(0, tokens - cached.device)
    again_s = target.cost.prefill_s(lacking, tokens - lacking)
    return target.cost.load_s(cached.dram, cached.redis) + target.standing.reuse * again_s
