"""What the policies of the step loop know of a request on its way through an engine."""

from __future__ import annotations

from typing import Protocol

from policies.fairness import TokenCounters
from policies.scheduling import Rank


class Job(Protocol):
    """A request's terms, how far it is, and what it was charged.

    Computed tokens chase known ones: `known` counts those of the prompt and those generated so far,
    `computed` those that are through. Times are on one clock, of the owner's choice. The policies
    write `due_s` (`WaitingLine`) and `counters`, `tag`, `prepaid`, `charged` and `turn` (`Meter`);
    they start as `scheduling.due_s(…)`, None, None, 0, 0 and 0. All else is the owner's to keep.
    """

    rank: Rank
    """No two jobs have the same `arrival`."""
    due_s: float
    """Its place in its flow's line."""
    counters: TokenCounters | None
    """Those in which what it takes is counted, since it first began."""
    tag: float | None
    """By it, the prompts of a class that are under way are in order; see `Meter.tag`."""
    prepaid: float
    """Units that its flow has been charged for it and that it has not taken yet."""
    charged: int
    """So many of its tokens have been computed at some time, and are not charged for again."""
    turn: float
    """Units for which a floor protects it; see `policies.floors`."""

    @property
    def flow(self) -> bytes:
        """Whose it is: within a class, flows share by weight."""

    @property
    def weight(self) -> float:
        """Its flow's, above 0."""

    @property
    def arrived_s(self) -> float:
        """When it came."""

    @property
    def deadline_s(self) -> float | None:
        """When its first token is wanted."""

    @property
    def max_tokens(self) -> int:
        """Its answer is not longer."""

    @property
    def begun(self) -> bool:
        """It has run, and was preempted; not to be changed while it waits."""

    @property
    def known(self) -> int:
        """Tokens of the prompt and those generated so far."""

    @property
    def computed(self) -> int:
        """Tokens that are through."""

    @property
    def generated(self) -> int:
        """Tokens generated so far."""

    @property
    def uncached(self) -> int:
        """While it waits: the tokens that it will compute before its next one."""
