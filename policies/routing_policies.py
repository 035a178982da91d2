"""The ways to choose a replica: the one by predicted time to first token, and simpler ones to
compare it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from policies.routing import Candidate, RouteRequest, RoutingPolicy
from policies.routing_prediction import predict
from policies.routing_ttft import PredictedTtft


class PrefixAffinity:
    """Where most of the prompt is cached, in whichever tier; among equals the least predicted
    queue."""

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate], random: Random) -> int:
        """The longest cached prefix."""
        usable = _usable(candidates)
        longest = max(candidates[index].cached.tokens for index in usable)
        warmest = [index for index in usable if candidates[index].cached.tokens == longest]
        if len(warmest) == 1:
            return warmest[0]
        return _least(warmest, lambda index: predict(request, candidates[index]).queue_s, random)


class LeastLoaded:
    """Where the fewest sequences run and wait."""

    def choose(
        self,
        request: RouteRequest,  # noqa: ARG002 - every policy is asked alike
        candidates: Sequence[Candidate],
        random: Random,
    ) -> int:
        """The fewest sequences."""

        def sequences(index: int) -> float:
            standing = candidates[index].standing
            return standing.waiting + standing.running

        return _least(_usable(candidates), sequences, random)


class RoundRobin:
    """Where nothing was sent for longest, so that it is fair while replicas come and go. Until it
    is told what was sent (`routing.TurnTaking`), that is what it chose."""

    def __init__(self) -> None:
        self._is_told = False
        self._turns = 0
        self._last: dict[str, int] = {}

    def choose(
        self,
        request: RouteRequest,  # noqa: ARG002 - every policy is asked alike
        candidates: Sequence[Candidate],
        random: Random,
    ) -> int:
        """Who had the last turn longest ago; among those who never had one, any."""
        names = [candidate.name for candidate in candidates]
        chosen = _least(_usable(candidates), lambda index: self._last.get(names[index], 0), random)
        if len(self._last) > 2 * len(names):
            present = set(names)
            self._last = {name: turn for name, turn in self._last.items() if name in present}
        if not self._is_told:
            self._take_turn(names[chosen])
        return chosen

    def sent(self, replica: str) -> None:
        """It has had its turn."""
        self._is_told = True
        self._take_turn(replica)

    def _take_turn(self, replica: str) -> None:
        self._turns += 1
        self._last[replica] = self._turns


class AtRandom:
    """Any."""

    def choose(
        self,
        request: RouteRequest,  # noqa: ARG002 - every policy is asked alike
        candidates: Sequence[Candidate],
        random: Random,
    ) -> int:
        """Any."""
        return _any(_usable(candidates), random)


BUILT_IN: dict[str, Callable[[], RoutingPolicy]] = {
    "predicted-ttft": PredictedTtft,
    "prefix-affinity": PrefixAffinity,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "random": AtRandom,
}
"""What makes each policy by the name that a configuration gives it."""


def _usable(candidates: Sequence[Candidate]) -> Sequence[int]:
    """Indices of those that are not full; if all are, then all."""
    usable = [index for index, candidate in enumerate(candidates) if not candidate.standing.full]
    return usable or range(len(candidates))


def _least(indices: Sequence[int], key: Callable[[int], float], random: Random) -> int:
    keys = [key(index) for index in indices]
    least = min(keys)
    return _any(
        [index for index, value in zip(indices, keys, strict=True) if value == least], random
    )


def _any(indices: Sequence[int], random: Random) -> int:
    return indices[0] if len(indices) == 1 else random.choice(indices)
