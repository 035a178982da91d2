"""What accounts have used and hold, and whether a request still fits: one gateway's view.

Time is an argument: `now_s` of a clock that never goes back, for windows and durations, and
`unix_s` for days and months.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from policies.limit_account import Account, Budget, Holding
from policies.limit_periods import next_period_s, period_start_s
from policies.limit_standing import AccountId, BudgetId, Ceiling, Standing, fits, share_of
from policies.limit_window import WindowShape
from policies.limits import BudgetPeriod, Demand

_NEW_SHARE = 0.2  # of the newest request in the running mean
_IDLE_S = 600.0
_FORGET_EVERY_S = 60.0


class Granted(NamedTuple):
    """The request is in; `standings` are with it counted, under `ceilings` as they were applied."""

    holding: Holding
    ceilings: Sequence[Ceiling]
    standings: Sequence[Standing]


class Refused(NamedTuple):
    """Nothing was taken. `standings` are without the request."""

    ceilings: Sequence[Ceiling]
    standings: Sequence[Standing]


class Unseeded(NamedTuple):
    """Nothing was decided: it must be said first what was spent of these."""

    budgets: Sequence[BudgetId]


class LimitBook:
    """Accounts that have been idle for ten minutes are forgotten."""

    def __init__(self, shape: WindowShape | None = None) -> None:
        """Windows are of a minute in seconds unless something else is said."""
        self.shape = shape if shape is not None else WindowShape()
        self._accounts: dict[AccountId, Account] = {}
        self._periods: dict[BudgetPeriod, tuple[int, int]] = {}
        self._forget_at_s = float("-inf")

    def __len__(self) -> int:
        return len(self._accounts)

    def account(self, account: AccountId, now_s: float) -> Account:
        """Made if it is not known yet."""
        known = self._accounts.get(account)
        if known is None:
            known = self._accounts[account] = Account(self.shape, now_s)
        return known

    def known(self, account: AccountId) -> Account | None:
        """The account, if anything is known of it."""
        return self._accounts.get(account)

    def period_start_s(self, per: BudgetPeriod, unix_s: float) -> int:
        """As `policies.limit_periods.period_start_s`, remembered."""
        start_s, end_s = self._periods.get(per, (0, 0))
        if not start_s <= unix_s < end_s:
            start_s = period_start_s(per, unix_s)
            self._periods[per] = (start_s, next_period_s(per, start_s))
        return start_s

    def reserve(
        self,
        ceilings: Sequence[Ceiling],
        demand: Demand,
        now_s: float,
        unix_s: float,
        gateways: int = 1,
    ) -> Granted | Refused | Unseeded:
        """Take what the request may use, of every account or of none.

        With several gateways that do not hear of each other, this one's part (`share_of`) counts.
        """
        self._forget_idle(now_s)
        bucket = self.shape.bucket(now_s)
        accounts = []
        budgets: list[Budget | None] = []
        unseeded = []
        for account_id, limits in ceilings:
            account = self.account(account_id, now_s)
            account.window.slide(bucket)
            accounts.append(account)
            budget = None
            if limits.budget_nusd is not None:
                per = limits.budget_per
                budget = account.budget(per, self.period_start_s(per, unix_s))
                if budget.ask_again_s <= now_s:
                    unseeded.append(BudgetId(account_id, per, budget.start_s))
            budgets.append(budget)
        if unseeded:
            return Unseeded(unseeded)
        if gateways > 1:
            ceilings = _shares(ceilings, accounts, budgets, demand, gateways, now_s)
        granted = _grantable(ceilings, accounts, budgets, demand)
        if granted is None:
            return Refused(
                ceilings,
                [
                    account.standing_against(demand, limits, budget, now_s)
                    for (_, limits), account, budget in zip(
                        ceilings, accounts, budgets, strict=True
                    )
                ],
            )
        holding = self._take(ceilings, accounts, budgets, bucket, *granted, now_s)
        reset_s = self.shape.gone_s(bucket) - now_s
        standings = [
            Standing(
                account.window.requests,
                account.window.tokens,
                account.in_flight,
                None if budget is None else budget.spent,
                0 if budget is None else budget.start_s,
                reset_s,
            )
            for account, budget in zip(accounts, budgets, strict=True)
        ]
        return Granted(holding, ceilings, standings)

    def admit(
        self,
        ceilings: Sequence[Ceiling],
        standings: Sequence[Standing],
        tokens: int,
        cost_nusd: int,
        now_s: float,
    ) -> Holding:
        """Note what all gateways together have let in here; `standings` are theirs with this
        request counted. What of a budget they do not count is counted here alone."""
        self._forget_idle(now_s)
        bucket = self.shape.bucket(now_s)
        accounts = []
        budgets: list[Budget | None] = []
        for (account_id, limits), standing in zip(ceilings, standings, strict=True):
            account = self.account(account_id, now_s)
            account.window.slide(bucket)
            accounts.append(account)
            limited = limits.budget_nusd is not None
            budgets.append(
                account.budget(limits.budget_per, standing.period_start_s) if limited else None
            )
        holding = self._take(ceilings, accounts, budgets, bucket, tokens, cost_nusd, now_s)
        for budget, standing in zip(budgets, standings, strict=True):
            if budget is not None and standing.spent_nusd is not None:
                budget.settled = standing.spent_nusd - budget.reserved
                budget.known = standing.spent_nusd
                budget.ask_again_s = float("inf")
        return holding

    def seed(
        self,
        budget_id: BudgetId,
        settled_nusd: int | None,
        now_s: float,
        ask_again_s: float = float("inf"),
    ) -> None:
        """What requests that are over have cost; None: what is known has to do. From `ask_again_s`
        on it is asked for anew. Changes nothing if somebody else has said so meanwhile."""
        account = self.account(budget_id.account, now_s)
        budget = account.budget(budget_id.per, budget_id.start_s)
        if budget.ask_again_s > now_s:
            return
        if settled_nusd is not None:
            budget.settled = settled_nusd
        budget.known = budget.spent
        budget.ask_again_s = ask_again_s

    def settle(self, holding: Holding, tokens: int, cost_nusd: int) -> bool:
        """What was used, counted when the request came; False, and no change, but for the first
        call."""
        if holding.settled or holding.released:
            return False
        holding.settled = True
        more_tokens = tokens - holding.tokens
        for account in holding.accounts:
            account.window.add(holding.bucket, 0, more_tokens)
        for budget in holding.budgets:
            budget.reserved -= holding.cost_nusd
            budget.settled += cost_nusd
        holding.tokens = tokens
        holding.cost_nusd = cost_nusd
        return True

    def release(self, holding: Holding, now_s: float) -> None:
        """The request is over; one that was not settled has never been. Only the first call
        counts."""
        if holding.released:
            return
        holding.released = True
        for account in holding.accounts:
            account.in_flight -= 1
            account.used_s = now_s
            account.mean_s += _NEW_SHARE * (now_s - holding.started_s - account.mean_s)
        if not holding.settled:
            for account in holding.accounts:
                account.window.add(holding.bucket, -1, -holding.tokens)
            for budget in holding.budgets:
                budget.reserved -= holding.cost_nusd

    def standings(self, ceilings: Sequence[Ceiling], now_s: float, unix_s: float) -> list[Standing]:
        """How accounts stand as far as is known here, with no demand on them."""
        standings = []
        for account_id, limits in ceilings:
            account = self._accounts.get(account_id)
            if account is None:
                standings.append(Standing(0, 0, 0))
                continue
            account.window.slide(self.shape.bucket(now_s))
            budget = account.budgets.get(limits.budget_per)
            if budget is not None and budget.start_s != self.period_start_s(
                limits.budget_per, unix_s
            ):
                budget = None
            standings.append(account.standing(budget, now_s))
        return standings

    def _take(
        self,
        ceilings: Sequence[Ceiling],
        accounts: Sequence[Account],
        budgets: Sequence[Budget | None],
        bucket: int,
        tokens: int,
        cost_nusd: int,
        now_s: float,
    ) -> Holding:
        counted = []
        for (_, limits), account in zip(ceilings, accounts, strict=True):
            account.used_s = now_s
            if limits.counts:
                account.window.add(bucket, 1, tokens)
                account.in_flight += 1
                counted.append(account)
        charged = [budget for budget in budgets if budget is not None]
        for budget in charged:
            budget.reserved += cost_nusd
        return Holding(counted, charged, bucket, tokens, cost_nusd, now_s)

    def _forget_idle(self, now_s: float) -> None:
        if now_s < self._forget_at_s:
            return
        self._forget_at_s = now_s + _FORGET_EVERY_S
        for account_id, account in list(self._accounts.items()):
            held = account.in_flight or any(each.reserved for each in account.budgets.values())
            if not held and now_s - account.used_s > _IDLE_S:
                del self._accounts[account_id]


def _shares(
    ceilings: Sequence[Ceiling],
    accounts: Sequence[Account],
    budgets: Sequence[Budget | None],
    demand: Demand,
    gateways: int,
    now_s: float,
) -> list[Ceiling]:
    """One gateway's part of each ceiling."""
    return [
        Ceiling(
            account_id,
            share_of(
                limits,
                gateways,
                account.standing(budget, now_s),
                None if budget is None else budget.known,
                demand,
            ),
        )
        for (account_id, limits), account, budget in zip(ceilings, accounts, budgets, strict=True)
    ]


def _grantable(
    ceilings: Sequence[Ceiling],
    accounts: Sequence[Account],
    budgets: Sequence[Budget | None],
    demand: Demand,
) -> tuple[int, int] | None:
    """The tokens and the cost (nUSD) that all of them have room for, up to what is wanted; None if
    one has not even room for what the request takes at least."""
    tokens, cost_nusd = demand.wanted_tokens, demand.wanted_cost_nusd
    for (_, limits), account, budget in zip(ceilings, accounts, budgets, strict=True):
        window = account.window
        if limits.rpm is not None and window.requests >= limits.rpm:
            return None
        if limits.concurrency is not None and account.in_flight >= limits.concurrency:
            return None
        if limits.tpm is not None:
            if not fits(demand.tokens, limits.tpm, window.tokens):
                return None
            tokens = min(tokens, limits.tpm - window.tokens)
        if limits.budget_nusd is not None and budget is not None:
            if not fits(demand.cost_nusd, limits.budget_nusd, budget.spent):
                return None
            cost_nusd = min(cost_nusd, limits.budget_nusd - budget.spent)
    return max(tokens, demand.tokens), max(cost_nusd, demand.cost_nusd)
