"""What a tenant, a key or a model of either may use, and what a request asks of that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BudgetPeriod = Literal["day", "month"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Ceilings; None is none. `rpm` and `tpm` hold for every span of 60 seconds, `concurrency` for
    requests in flight, `budget_nusd` (billionths of a US dollar) for a calendar day or month in
    UTC."""

    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None
    budget_nusd: int | None = None
    budget_per: BudgetPeriod = "month"

    @property
    def any(self) -> bool:
        """Whether there is any ceiling at all."""
        return not (self.rpm is self.tpm is self.concurrency is self.budget_nusd is None)

    @property
    def counts(self) -> bool:
        """Whether requests under it are counted, in the window and in flight. What is under a
        budget alone, as a line of a batch is, only costs: it must not use up what is there for
        others of the account, under limits of theirs."""
        return not (self.rpm is self.tpm is self.concurrency is None)


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request is about to use.

    It is refused unless `tokens` and `cost_nusd` fit; `wanted_tokens` and `wanted_cost_nusd`, at
    least as much, are set aside as far as there is room for them. They differ where the client has
    not said how long its answer may be: then only the prompt and one token must fit. Tokens are
    weighted (cached ones count less), and predictions until the request is settled.
    """

    tokens: int
    wanted_tokens: int
    cost_nusd: int = 0
    wanted_cost_nusd: int = 0
