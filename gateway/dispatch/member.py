"""One replica of a model, of whatever kind, as dispatch sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Literal, Protocol, TypeVar

from cache.breaker import Breaker, BreakerState
from gateway.dispatch.load import Load
from policies.cost import Coefficients
from policies.routing import NOTHING_CACHED, Cached, Candidate

ReplicaKind = Literal["in-process", "process", "remote"]


class Condition(StrEnum):
    """What a replica can do: STARTING will serve, SERVING does, DRAINING only finishes what it
    has, DOWN does nothing (its supervisor or its probes may bring it back)."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    DOWN = "down"


_SERVING = Condition.SERVING
"""By itself, since it is gone by so often, and to look a member up in its class takes long."""


@dataclass(frozen=True, slots=True)
class Health:
    """A replica's condition, and why, in words for the operator. `final`: it will not change."""

    condition: Condition
    reason: str = ""
    final: bool = False


class Routable(Protocol):
    """What dispatch needs to know of a replica."""

    @property
    def name(self) -> str:
        """Unique among all replicas, and the same after a restart."""
        ...

    def health(self) -> Health:
        """As last known; cheap."""
        ...

    def coefficients(self) -> Coefficients:
        """What work takes there, as last known; cheap."""
        ...


ReplicaT_co = TypeVar("ReplicaT_co", bound=Routable, covariant=True)


class Member(Generic[ReplicaT_co]):
    """A replica with what dispatch keeps about it. Belongs to the event loop.

    `block_tokens` is the size of the blocks in which its cache is followed. `draining` says that
    the operator wants it empty, whatever it says of itself.
    """

    def __init__(
        self,
        replica: ReplicaT_co,
        kind: ReplicaKind,
        *,
        max_running: int,
        capacity: int | None,
        block_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self.replica = replica
        self.name = replica.name
        self.kind: ReplicaKind = kind
        self.block_tokens = block_tokens
        self.load = Load(max_running, capacity)
        self.breaker = Breaker()
        self.draining = False
        self._cold: Candidate | None = None
        self._clock = clock

    def health(self) -> Health:
        """The replica's own word, unless the operator or the breaker has spoken."""
        health = self.replica.health()
        if self.draining and health.condition in (Condition.STARTING, Condition.SERVING):
            return Health(Condition.DRAINING, "drained by the operator")
        return health

    def takes_requests(self) -> bool:
        """Whether a request may be sent there now. While the breaker is open, one at a time may,
        when its time has come: that is the probe."""
        if self.draining or self.replica.health().condition is not Condition.SERVING:
            return False
        return self.breaker.closed or self.breaker.wait_s(self._clock()) == 0.0

    def candidate(
        self, cost: Coefficients, priority: int, cached: Cached | None
    ) -> Candidate | None:
        """The replica for a request of this priority, None while it takes none. `cached` is what it
        has of the prompt, None if nothing: then it is the same object until something about it
        changes, since most replicas have nothing of most prompts.

        Asked of every replica for every decision: so few calls in here.
        """
        if (
            self.draining
            or self.replica.health().condition is not _SERVING
            or not (self.breaker.closed or self.takes_requests())
        ):
            return None
        standing = self.load.standing(priority)
        if cached is not None:
            return Candidate(self.name, cost, standing, cached)
        cold = self._cold
        if cold is None or cold[2] is not standing or cold[1] is not cost:
            cold = self._cold = Candidate(self.name, cost, standing, NOTHING_CACHED)
        return cold

    def may_return(self) -> bool:
        """Whether it may take requests again by itself."""
        return not self.draining and not self.replica.health().final

    def answered(self) -> None:
        """A request that was sent there has begun to be answered."""
        if self.breaker.state is BreakerState.PROBING:
            self.breaker.probe_succeeded()
        else:
            self.breaker.success()

    def failed(self) -> None:
        """A request that was sent there was lost, by no fault of its own."""
        now_s = self._clock()
        if self.breaker.state is BreakerState.PROBING:
            self.breaker.probe_failed(now_s)
        else:
            self.breaker.failure(now_s)
