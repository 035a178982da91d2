"""A request as the policies of the step loop know it, with nothing behind it."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.fairness import TokenCounters
from policies.scheduling import Rank, due_s


@dataclass(slots=True, eq=False)
class PlainJob:
    """A `policies.job.Job` of which everything is said outright."""

    arrival: int
    known: int = 10
    flow: bytes = b""
    weight: float = 1.0
    priority: int = 0
    arrived_s: float = 0.0
    deadline_s: float | None = None
    max_tokens: int = 8
    begun: bool = False
    computed: int = 0
    generated: int = 0
    uncached: int = 0
    rank: Rank = field(init=False)
    due_s: float = field(init=False)
    counters: TokenCounters | None = None
    tag: float | None = None
    prepaid: float = 0.0
    charged: int = 0
    turn: float = 0.0

    def __post_init__(self) -> None:
        self.rank = Rank(self.priority, self.arrival)
        self.due_s = due_s(self.arrived_s, self.deadline_s, self.arrived_s)
        self.uncached = self.uncached or self.known
