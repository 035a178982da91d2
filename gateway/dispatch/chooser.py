"""One model's routing policy, which may be anybody's, and what stands in for it where it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from random import Random

import structlog

from policies.routing import Candidate, RouteRequest, RoutingPolicy
from policies.routing_ttft import PredictedTtft

_log = structlog.get_logger("forebay.routing")

_FALLBACK = "predicted-ttft"


class Chooser:
    """Predicted-ttft chooses whenever the policy cannot. The policy's first failure is logged."""

    def __init__(self, model: str, name: str, policy: RoutingPolicy, random: Random) -> None:
        self.name = name
        self._model = model
        self._policy = policy
        self._tell: Callable[[str], object] | None = getattr(policy, "sent", None)
        self._random = random
        self._fallback = PredictedTtft()
        self._failed = False

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> tuple[int, str]:
        """Which candidate, and the name of the policy that says so. There is at least one."""
        if len(candidates) == 1:
            return 0, self.name  # there is nothing to choose
        try:
            chosen = index(self._policy.choose(request, candidates, self._random))
            if not 0 <= chosen < len(candidates):
                raise IndexError(f"it chose number {chosen} of {len(candidates)}")
        except Exception as failure:  # noqa: BLE001 - a policy may be anybody's, and fail in any way
            self._note_failure(failure, instead=_FALLBACK)
            return self._fallback.choose(request, candidates, self._random), _FALLBACK
        return chosen, self.name

    def sent(self, replica: str) -> None:
        """A request is being sent there: a policy that takes turns is told (`TurnTaking`)."""
        if self._tell is None:
            return
        try:
            self._tell(replica)
        except Exception as failure:  # noqa: BLE001 - as above; what it chooses is followed still
            self._note_failure(failure, instead=None)

    def _note_failure(self, failure: Exception, instead: str | None) -> None:
        if not self._failed:
            self._failed = True
            _log.error(
                "routing policy failed",
                policy=self.name,
                model=self._model,
                instead=instead,
                exc_info=failure,
            )
