"""Whose ceilings a request is under, how they stand, and which of them it comes up against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from policies.limit_periods import next_period_s
from policies.limits import BudgetPeriod, Demand, Limits

Dimension = Literal["requests", "tokens", "concurrency", "budget"]

DIMENSIONS: tuple[Dimension, ...] = ("requests", "tokens", "concurrency", "budget")

_LONGEST_PLACE_WAIT_S = 60.0


class AccountId(NamedTuple):
    """Whose use is counted together: a tenant's, a key's, or that of a model within a tenant."""

    tenant: str
    scope: Literal["tenant", "key", "model"] = "tenant"
    name: str = ""


class Ceiling(NamedTuple):
    """An account and what it may use."""

    account: AccountId
    limits: Limits


class BudgetId(NamedTuple):
    """An account's budget for the day or month that began at `start_s` (Unix)."""

    account: AccountId
    per: BudgetPeriod
    start_s: int


class Standing(NamedTuple):
    """What of an account is used, what is set aside included.

    `spent_nusd` is for the period that began at `period_start_s`, None without a budget. After
    `reset_s` nothing of the window counts any more. The waits are how long until this demand has
    room if nothing else comes, 0 if it has; `mean_s` is how long a request of the account takes.
    """

    requests: int
    tokens: int
    in_flight: int
    spent_nusd: int | None = None
    period_start_s: int = 0
    reset_s: float = 0.0
    requests_wait_s: float = 0.0
    tokens_wait_s: float = 0.0
    mean_s: float = 1.0


class Obstacle(NamedTuple):
    """The ceiling that keeps a request out longest. `wait_s` is after which it fits if nothing else
    comes, None if it never does: it asks for more than `limit`."""

    dimension: Dimension
    account: AccountId
    limit: int
    used: int
    asked: int
    wait_s: float | None
    per: BudgetPeriod | None = None


def fits(demand: int, limit: int, used: int) -> bool:
    """Whether so much more is within the limit. Nothing always is, however much was used."""
    return demand <= max(0, limit - used)


def obstacle(
    ceilings: Sequence[Ceiling], standings: Sequence[Standing], demand: Demand, unix_s: float
) -> Obstacle:
    """Why a request with these standings was refused. Raises ValueError if nothing is in its way.

    `unix_s` is now, by the clock that the periods are told from.
    """
    found = [
        each
        for (account, limits), standing in zip(ceilings, standings, strict=True)
        for each in _obstacles(account, limits, standing, demand, unix_s)
    ]
    if not found:
        raise ValueError("nothing is in the way of this demand")
    return max(found, key=lambda each: math.inf if each.wait_s is None else each.wait_s)


def _obstacles(
    account: AccountId, limits: Limits, standing: Standing, demand: Demand, unix_s: float
) -> list[Obstacle]:
    found = []
    if limits.rpm is not None and not fits(1, limits.rpm, standing.requests):
        wait_s = standing.requests_wait_s
        found.append(Obstacle("requests", account, limits.rpm, standing.requests, 1, wait_s))
    if limits.tpm is not None and not fits(demand.tokens, limits.tpm, standing.tokens):
        too_much = demand.tokens > limits.tpm
        found.append(
            Obstacle(
                "tokens",
                account,
                limits.tpm,
                standing.tokens,
                demand.tokens,
                None if too_much else standing.tokens_wait_s,
            )
        )
    if limits.concurrency is not None and not fits(1, limits.concurrency, standing.in_flight):
        wait_s = min(standing.mean_s / limits.concurrency, _LONGEST_PLACE_WAIT_S)
        found.append(
            Obstacle("concurrency", account, limits.concurrency, standing.in_flight, 1, wait_s)
        )
    budget, spent = limits.budget_nusd, standing.spent_nusd
    if budget is not None and spent is not None and not fits(demand.cost_nusd, budget, spent):
        until_next_s = next_period_s(limits.budget_per, standing.period_start_s) - unix_s
        found.append(
            Obstacle(
                "budget",
                account,
                budget,
                spent,
                demand.cost_nusd,
                None if demand.cost_nusd > budget else max(0.0, until_next_s),
                limits.budget_per,
            )
        )
    return found


def share_of(
    limits: Limits, gateways: int, own: Standing, known_nusd: int | None, demand: Demand
) -> Limits:
    """What one of `gateways` may let in while it does not hear of what the others do.

    Rates and places are divided, rounded up. A budget's is a part of what was left when
    `known_nusd` was all that had been spent; `own` adds to that what this gateway has let in since.
    A demand that is within the limit, but not within a part of it, is let in where this gateway has
    nothing else of the account counting: otherwise it would be refused for as long as that lasts.
    """

    def part(limit: int, used: int, asked: int) -> int:
        divided = -(-limit // gateways)
        return max(divided, min(asked, limit)) if used <= 0 else divided

    budget = limits.budget_nusd
    if budget is not None and known_nusd is not None and own.spent_nusd is not None:
        since = own.spent_nusd - known_nusd
        budget = known_nusd + part(max(0, budget - known_nusd), since, demand.cost_nusd)
    return replace(
        limits,
        rpm=None if limits.rpm is None else part(limits.rpm, own.requests, 1),
        tpm=None if limits.tpm is None else part(limits.tpm, own.tokens, demand.tokens),
        concurrency=(
            None if limits.concurrency is None else part(limits.concurrency, own.in_flight, 1)
        ),
        budget_nusd=budget,
    )
