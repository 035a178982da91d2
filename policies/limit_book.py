"""What accounts have used and hold, and whether a request still fits: one gateway's view.

Time is an argument: `now_s` of a clock that never goes back, for windows and durations, and
`unix_s` for days and months.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from policies.limit_periods import next_period_s, period_start_s
from policies.limit_standing import AccountId, BudgetId, Ceiling, Standing, fits, share_of
from policies.limit_window import Window, WindowShape
from policies.limits import BudgetPeriod, Demand

_NEW_SHARE = 0.2  # of the newest request in the running mean
_IDLE_S = 600.0
_FORGET_EVERY_S = 60.0


class Budget:
    """One period's. `settled` is what requests have cost that are over, `reserved` what is set
    aside for those that are not. `known` is what had been spent in all when the other gateways were
    last heard of. Once it is `ask_again_s`, `settled` is a guess that should be replaced."""

    __slots__ = ("ask_again_s", "known", "reserved", "settled", "start_s")

    def __init__(self, start_s: int) -> None:
        self.start_s = start_s
        self.settled = 0
        self.reserved = 0
        self.known = 0
        self.ask_again_s = float("-inf")

    @property
    def spent(self) -> int:
        """What counts against the limit."""
        return self.settled + self.reserved


class Account:
    """One account's use. `mean_s` is how long its requests take."""

    __slots__ = ("budgets", "in_flight", "mean_s", "used_s", "window")

    def __init__(self, window: Window) -> None:
        self.window = window
        self.in_flight = 0
        self.mean_s = 1.0
        self.used_s = 0.0
        self.budgets: dict[BudgetPeriod, Budget] = {}

    def budget(self, per: BudgetPeriod, start_s: int) -> Budget:
        """The one of this period; that of an earlier one ends."""
        budget = self.budgets.get(per)
        if budget is None or budget.start_s != start_s:
            budget = self.budgets[per] = Budget(start_s)
        return budget


class Holding:
    """What one request holds of its accounts, each of them to the same amount. `accounts` are those
    in which it is counted (`Limits.counts`)."""

    __slots__ = (
        "accounts",
        "bucket",
        "budgets",
        "cost_nusd",
        "released",
        "settled",
        "started_s",
        "tokens",
    )

    def __init__(
        self,
        accounts: Sequence[Account],
        budgets: Sequence[Budget],
        bucket: int,
        tokens: int,
        cost_nusd: int,
        started_s: float,
    ) -> None:
        self.accounts = accounts
        self.budgets = budgets
        self.bucket = bucket
        self.tokens = tokens
        self.cost_nusd = cost_nusd
        self.started_s = started_s
        self.settled = False
        self.released = False


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
            known = Account(Window(self.shape, self.shape.bucket(now_s)))
            known.used_s = now_s
            self._accounts[account] = known
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
        unseeded = []
        budgets: list[Budget | None] = []
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
            ceilings = [
                Ceiling(
                    account_id,
                    share_of(
                        limits,
                        gateways,
                        self._standing(account, budget, now_s),
                        None if budget is None else budget.known,
                        demand,
                    ),
                )
                for (account_id, limits), account, budget in zip(
                    ceilings, accounts, budgets, strict=True
                )
            ]
        tokens, cost_nusd = demand.wanted_tokens, demand.wanted_cost_nusd
        has_room = True
        for (_, limits), account, budget in zip(ceilings, accounts, budgets, strict=True):
            window = account.window
            if limits.rpm is not None and window.requests >= limits.rpm:
                has_room = False
            if limits.concurrency is not None and account.in_flight >= limits.concurrency:
                has_room = False
            if limits.tpm is not None:
                has_room &= fits(demand.tokens, limits.tpm, window.tokens)
                tokens = min(tokens, limits.tpm - window.tokens)
            if limits.budget_nusd is not None and budget is not None:
                has_room &= fits(demand.cost_nusd, limits.budget_nusd, budget.spent)
                cost_nusd = min(cost_nusd, limits.budget_nusd - budget.spent)
        if not has_room:
            return Refused(
                ceilings,
                [
                    self._refused_standing(ceiling, account, budget, demand, now_s)
                    for ceiling, account, budget in zip(ceilings, accounts, budgets, strict=True)
                ],
            )
        holding = self._take(
            ceilings,
            accounts,
            budgets,
            bucket,
            max(tokens, demand.tokens),
            max(cost_nusd, demand.cost_nusd),
            now_s,
        )
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
            standings.append(self._standing(account, budget, now_s))
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

    def _standing(self, account: Account, budget: Budget | None, now_s: float) -> Standing:
        newest = account.window.newest_used()
        return Standing(
            account.window.requests,
            account.window.tokens,
            account.in_flight,
            None if budget is None else budget.spent,
            0 if budget is None else budget.start_s,
            0.0 if newest is None else self.shape.gone_s(newest) - now_s,
            mean_s=account.mean_s,
        )

    def _refused_standing(
        self,
        ceiling: Ceiling,
        account: Account,
        budget: Budget | None,
        demand: Demand,
        now_s: float,
    ) -> Standing:
        window, limits = account.window, ceiling.limits
        requests_wait_s = tokens_wait_s = 0.0
        if limits.rpm is not None and (surplus := window.requests + 1 - limits.rpm) > 0:
            bucket = window.bucket_freeing_requests(surplus)
            requests_wait_s = 0.0 if bucket is None else self.shape.gone_s(bucket) - now_s
        if limits.tpm is not None and (surplus := window.tokens + demand.tokens - limits.tpm) > 0:
            bucket = window.bucket_freeing_tokens(surplus)
            tokens_wait_s = 0.0 if bucket is None else self.shape.gone_s(bucket) - now_s
        return self._standing(account, budget, now_s)._replace(
            requests_wait_s=requests_wait_s, tokens_wait_s=tokens_wait_s
        )

    def _forget_idle(self, now_s: float) -> None:
        if now_s < self._forget_at_s:
            return
        self._forget_at_s = now_s + _FORGET_EVERY_S
        for account_id, account in list(self._accounts.items()):
            held = account.in_flight or any(each.reserved for each in account.budgets.values())
            if not held and now_s - account.used_s > _IDLE_S:
                del self._accounts[account_id]
