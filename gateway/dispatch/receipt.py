"""What was known when a request was sent somewhere, what was chosen, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.routing import Candidate, Prediction, RouteRequest
from policies.routing_prediction import predict


@dataclass(slots=True)
class Receipt:
    """One decision. Times are monotonic seconds; `None` is what has not come to be.

    `passed_by` names the replicas that were no candidates, with the reason. `moved_from` is the
    replica that was lost, where this decision moved a request that was already running.
    """

    model: str
    policy: str
    request: RouteRequest
    candidates: Sequence[Candidate]
    chosen: int
    decided_s: float
    decision_s: float
    passed_by: dict[str, str] = field(default_factory=dict)
    moved_from: str | None = None
    had_begun: bool = False
    """Whether the request had got its first token before it was moved."""
    began_s: float | None = None
    served_tokens: int | None = None
    """Prompt tokens that came from the cache in truth."""
    lost: str | None = None
    """Why the replica was lost, if it was."""
    _predicted: Prediction | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def candidate(self) -> Candidate:
        """The chosen one, as it was believed to be."""
        return self.candidates[self.chosen]

    def predict(self, candidate: Candidate) -> Prediction:
        """A candidate's predicted time to first token, by term."""
        if candidate is not self.candidate:
            return predict(self.request, candidate)
        if self._predicted is None:
            self._predicted = predict(self.request, candidate)
        return self._predicted

    @property
    def predicted_ttft_s(self) -> float:
        """Of the chosen one."""
        return self.predict(self.candidate).ttft_s

    @property
    def ttft_s(self) -> float | None:
        """From the decision to the first token."""
        return None if self.began_s is None else self.began_s - self.decided_s

    @property
    def error_s(self) -> float | None:
        """What it took beyond the prediction; negative if it was faster."""
        ttft_s = self.ttft_s
        return None if ttft_s is None else ttft_s - self.predicted_ttft_s
