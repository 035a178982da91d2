"""A simulated fleet over time, as a live one's metrics show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadtest.record import Sample
from loadtest.simulate.outcomes import Outcomes
from loadtest.trace import TraceRequest

_SAMPLES = 200


class Timeline:
    """About 200 samples between the first and the last arrival, each as of the first one that
    comes after its time. `here` says how many run, and how many wait."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        outcomes: Outcomes,
        here: Callable[[], tuple[int, int]],
    ) -> None:
        self.samples: list[Sample] = []
        self._outcomes = outcomes
        self._here = here
        self._due_s = requests[0].at_s if requests else 0.0
        last_s = requests[-1].at_s if requests else 0.0
        self._every_s = (last_s - self._due_s) / _SAMPLES

    def pass_by(self, now_s: float) -> None:
        """It is so late; called often, and mostly does nothing."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + self._every_s
        running, waiting = self._here()
        outcomes = self._outcomes
        device, dram, redis = outcomes.cached_tokens
        self.samples.append(
            Sample(now_s, running, waiting, outcomes.prompt_tokens, device, dram, redis)
        )
