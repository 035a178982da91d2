"""What a tenant was promised: targets, and what is done when they cannot be met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

OnOverload = Literal["reject", "queue", "downgrade"]


class LatestTimes(NamedTuple):
    """Of an answer of which only the end was seen: what its times cannot have been longer than."""

    ttft_s: float
    tpot_s: float | None


@dataclass(frozen=True, slots=True)
class Slo:
    """`ttft_s` to the first token and `tpot_s` between tokens are met by a share of at least
    `target` of the requests; None: nothing was promised.

    A request whose first token is predicted too late is rejected, waits at most `max_queue_s` for a
    better moment, or runs on the model `downgrade_to`.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    target: float = 0.95
    on_overload: OnOverload = "reject"
    downgrade_to: str | None = None
    max_queue_s: float = 10.0

    @property
    def promises(self) -> bool:
        """Whether there is any target."""
        return self.ttft_s is not None or self.tpot_s is not None

    def met(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Whether an answer with these times kept the promise. A time that never came to be, as
        between the tokens of an answer of one, breaks none; an answer without a first token does.
        """
        if ttft_s is None:
            return False
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return False
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s

    def judged(
        self, ttft_s: float | None, tpot_s: float | None, at_most: LatestTimes | None = None
    ) -> bool | None:
        """The same; None where nothing was promised, or where `at_most` is given, in place of the
        times, and is too long to tell."""
        if not self.promises:
            return None
        if at_most is None:
            return self.met(ttft_s, tpot_s)
        return True if self.met(*at_most) else None


NO_SLO = Slo()
