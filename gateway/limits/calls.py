"""What is asked of the script, and what it answers. Times in operations are `time.monotonic`; the
script is told ages, which it takes from its own clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol

import msgspec

from cache.redis_client import Command
from gateway.limits.script import SHA, keys_of
from gateway.limits.seeds import Seed
from policies.limit_standing import AccountId, BudgetId, Ceiling, Standing
from policies.limit_window import WindowShape
from policies.limits import BudgetPeriod, Demand

_KINDS: dict[BudgetPeriod, str] = {"day": "d", "month": "m"}
_PACKER = msgspec.msgpack.Encoder()
_NUMBERS = 9  # of each account in an answer

Argument = str | int | None


class Sender:
    """What all calls of one gateway have in common. `gateway` is a name that no other one has."""

    def __init__(self, gateway: str, shape: WindowShape, lease_s: float) -> None:
        self.gateway = gateway
        self.shape = shape
        self.lease_s = lease_s
        self._marks = count(1)

    def call(self, tenant: str, verb: str, generation: int, *rest: Argument) -> Command:
        """One call of the script. A hash that it finds unmarked gets a mark that none has had."""
        shape = self.shape
        head = (verb, self.gateway, generation, shape.width_us, shape.buckets)
        mark = f"{self.gateway}.{next(self._marks):x}"
        lease_us = int(self.lease_s * 1e6)
        # one packed argument: each of many would cost the client more than all of this
        packed = _PACKER.encode((*head, lease_us, mark, *rest))
        return ("EVALSHA", SHA, 2, *keys_of(tenant), packed)


def account_name(account: AccountId) -> str:
    """As in the hash's fields."""
    if account.scope == "tenant":
        return "t"
    return f"{account.scope[0]}:{account.name}"


def account_of(tenant: str, name: str) -> AccountId:
    """The account of a tenant that has this name in the hash's fields."""
    if name == "t":
        return AccountId(tenant)
    return AccountId(tenant, "key" if name[0] == "k" else "model", name[2:])


def reserve_arguments(
    request: str,
    ceilings: Sequence[Ceiling],
    demand: Demand,
    seeds: dict[BudgetId, Seed],
    now_s: float,
) -> list[Argument]:
    """The rest of a `reserve` call."""
    arguments: list[Argument] = [
        request,
        demand.tokens,
        demand.wanted_tokens,
        demand.cost_nusd,
        demand.wanted_cost_nusd,
        len(ceilings),
    ]
    by_budget = {(budget.account, budget.per): (budget, seed) for budget, seed in seeds.items()}
    for account, limits in ceilings:
        arguments += [
            account_name(account),
            limits.rpm,
            limits.tpm,
            limits.concurrency,
            limits.budget_nusd,
            "" if limits.budget_nusd is None else _KINDS[limits.budget_per],
        ]
        budget, seed = by_budget.get((account, limits.budget_per), (None, None))
        if budget is None or seed is None:
            arguments += [None, None, None, None]
        elif seed.asked_s is None:
            arguments += [None, None, None, seed.nusd]
        else:
            arguments += [seed.nusd, budget.start_s, _age_us(seed.asked_s, now_s), None]
    return arguments


class ReserveAnswer(NamedTuple):
    """`status` is granted, refused, unseeded or stale. `unix_s` is the server's time. Standings are
    with the request counted if it was granted; a budget that is not kept there has None spent."""

    status: str
    epoch: str
    unix_s: float
    tokens: int
    cost_nusd: int
    standings: list[Standing]
    counted: list[bool]


def read_reserve(answer: Sequence[Any]) -> ReserveAnswer:
    """Raises ValueError or IndexError for what the script does not say."""
    status, epoch, unix_us = answer[0].decode(), answer[1].decode(), answer[2]
    if status == "stale":
        return ReserveAnswer(status, epoch, unix_us / 1e6, 0, 0, [], [])
    standings, counted = [], []
    numbers = answer[5:]
    for start in range(0, len(numbers), _NUMBERS):
        (
            requests,
            tokens,
            in_flight,
            spent,
            period,
            kept,
            reset_us,
            for_request_us,
            for_tokens_us,
        ) = numbers[start : start + _NUMBERS]
        counted.append(bool(kept))
        standings.append(
            Standing(
                requests,
                tokens,
                in_flight,
                None if spent < 0 else spent,
                period,
                reset_us / 1e6,
                for_request_us / 1e6,
                for_tokens_us / 1e6,
            )
        )
    return ReserveAnswer(status, epoch, unix_us / 1e6, answer[3], answer[4], standings, counted)


class BudgetPart(NamedTuple):
    """An account and, if the request counts against a budget of its, which period of which."""

    account: str
    kind: str = ""
    start_s: int = 0


def budget_part(account: AccountId, per: BudgetPeriod | None, start_s: int) -> BudgetPart:
    """As in the hash's fields."""
    name = account_name(account)
    return BudgetPart(name) if per is None else BudgetPart(name, _KINDS[per], start_s)


class Operation(Protocol):
    """Something to tell the script."""

    def arguments(self, now_s: float) -> list[Argument]:
        """Its name and what follows it."""
        ...


class Settle(NamedTuple):
    """What a request has used."""

    request: str
    tokens: int
    cost_nusd: int
    at_s: float
    budgets: tuple[BudgetPart, ...]

    def arguments(self, now_s: float) -> list[Argument]:
        """See `Operation`."""
        return [
            "settle",
            self.request,
            self.tokens,
            self.cost_nusd,
            _age_us(self.at_s, now_s),
            len(self.budgets),
            *_flat(self.budgets),
        ]


class Release(NamedTuple):
    """A request that was settled is over."""

    request: str

    def arguments(self, now_s: float) -> list[Argument]:  # noqa: ARG002 - the protocol's
        """See `Operation`."""
        return ["release", self.request]


class Undo(NamedTuple):
    """A request has never been."""

    request: str

    def arguments(self, now_s: float) -> list[Argument]:  # noqa: ARG002 - the protocol's
        """See `Operation`."""
        return ["undo", self.request]


class Adopt(NamedTuple):
    """A request in flight that is not known there, or perhaps not. `in_windows` is whether its
    requests and tokens are to be counted, or are already, in the accounts that are `counted`; of
    the others it holds a budget alone."""

    request: str
    in_windows: bool
    at_s: float
    tokens: int
    cost_nusd: int
    settled: bool
    parts: tuple[BudgetPart, ...]
    counted: frozenset[str]

    def arguments(self, now_s: float) -> list[Argument]:
        """See `Operation`."""
        return [
            "adopt",
            self.request,
            self.in_windows,
            _age_us(self.at_s, now_s),
            self.tokens,
            self.cost_nusd,
            self.settled,
            len(self.parts),
            *[value for part in self.parts for value in (*part, part.account in self.counted)],
        ]


class Count(NamedTuple):
    """Requests that are over, and came at this time or before."""

    account: str
    until_s: float
    requests: int
    tokens: int

    def arguments(self, now_s: float) -> list[Argument]:
        """See `Operation`."""
        age_us = _age_us(self.until_s, now_s)
        return ["count", self.account, age_us, self.requests, self.tokens]


class Spend(NamedTuple):
    """What requests have cost that were settled at this time."""

    part: BudgetPart
    cost_nusd: int
    at_s: float

    def arguments(self, now_s: float) -> list[Argument]:
        """See `Operation`."""
        return ["spend", *self.part, self.cost_nusd, _age_us(self.at_s, now_s)]


class Renew(NamedTuple):
    """These are still in flight."""

    requests: tuple[str, ...]

    def arguments(self, now_s: float) -> list[Argument]:  # noqa: ARG002 - the protocol's
        """See `Operation`."""
        return ["renew", len(self.requests), *self.requests]


def apply_arguments(
    number: int,
    before: int,
    epoch: str | None,
    operations: Iterable[Operation],
    now_s: float,
) -> list[Argument]:
    """The rest of an `apply` call. It is applied after the batch numbered `before` only, and to a
    hash with this mark; None: to any."""
    told = [operation.arguments(now_s) for operation in operations]
    return [number, before, epoch, len(told), *[value for each in told for value in each]]


class ApplyAnswer(NamedTuple):
    """`status` is applied, lost (the hash has another mark) or gap (another batch has to come
    first). `missing` are requests that were to be renewed and have lost their lease."""

    status: str
    epoch: str
    missing: list[str]


def read_apply(answer: Sequence[Any]) -> ApplyAnswer:
    """Raises IndexError for what the script does not say."""
    missing = [request.decode() for request in answer[3:]]
    return ApplyAnswer(answer[0].decode(), answer[1].decode(), missing)


def _flat(parts: Iterable[BudgetPart]) -> list[Argument]:
    return [value for part in parts for value in part]


def _age_us(at_s: float, now_s: float) -> int:
    return max(0, int((now_s - at_s) * 1e6))
