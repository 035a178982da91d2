"""What work takes on each of a model's replicas, as routing goes by it.

Replicas of one model are mostly alike, while what each has learned of itself differs by chance as
well: by what ran beside it when it was measured, by how little it has done so far. Taken at their
word, the one whose figures happen to be the lowest would get everything that is cached nowhere, a
replica that has just been started above all; and one whose figures were bad once would not be asked
again, and could never show better ones. So a replica's own figures count for as much as it has been
asked lately, and for the rest it is taken to be like the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from policies.cost import Coefficients

_HALF_OWN = 16.0
"""After so many answers, a replica's own figures count for half."""
_HALF_LIFE_S = 60.0
"""In so much time an answer comes to count for half. It is what a replica that was slow waits for
until it is tried again: minutes, so that one which is slow still costs few requests much."""
_LEAST = 1e-3
"""In answers: what the figures of a replica count for that has given none, where none has."""
_EVERY_S = 0.25
_SECONDS = 9
"""So many coefficients are times, those that come first."""


class ReplicaCosts:
    """Of one model. Made anew a few times a second, since it is asked for each decision."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[float, float]] = {}
        self._costs: Mapping[str, Coefficients] = {}
        self._due_s = -math.inf

    def answered(self, replica: str, now_s: float) -> None:
        """It has begun to answer a request."""
        self._answers[replica] = (self._count(replica, now_s) + 1.0, now_s)

    def forget(self, replica: str) -> None:
        """It is gone, or another process by now: what it showed tells nothing any more."""
        self._answers.pop(replica, None)
        self.outdated()

    def outdated(self) -> None:
        """The replicas are others than before."""
        self._due_s = -math.inf

    def due(self, now_s: float) -> bool:
        """Whether `update` is to be called before `costs` are gone by."""
        return now_s >= self._due_s

    @property
    def costs(self) -> Mapping[str, Coefficients]:
        """By replica, as of the last update."""
        return self._costs

    def update(self, own: Mapping[str, Coefficients], now_s: float) -> None:
        """Take in what the replicas say of themselves: all of them, whatever their condition."""
        self._due_s = now_s + _EVERY_S
        if len(set(own.values())) < 2:
            self._costs = own
            return
        counts = {replica: self._count(replica, now_s) for replica in own}
        weights = [count + _LEAST for count in counts.values()]
        total = sum(weights)
        common = [
            sum(weight * cost[index] for weight, cost in zip(weights, own.values(), strict=True))
            / total
            for index in range(_SECONDS)
        ]
        self._costs = {
            replica: _between(common, cost, counts[replica] / (counts[replica] + _HALF_OWN))
            for replica, cost in own.items()
        }

    def _count(self, replica: str, now_s: float) -> float:
        count, at_s = self._answers.get(replica, (0.0, now_s))
        return count * math.exp2((at_s - now_s) / _HALF_LIFE_S)


def _between(common: list[float], own: Coefficients, own_share: float) -> Coefficients:
    seconds = [
        theirs + own_share * (mine - theirs)
        for theirs, mine in zip(common, own[:_SECONDS], strict=True)
    ]
    return Coefficients._make((*seconds, own.step_tokens, own.block_tokens))
