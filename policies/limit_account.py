"""What one account has used and holds, and what one request holds of several: as one gateway knows.

Time is an argument: `now_s` of a clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.limit_standing import Standing
from policies.limit_window import Window, WindowShape
from policies.limits import BudgetPeriod, Demand, Limits


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
    """One account's use. `mean_s` is how long its requests take, `used_s` when one last came or
    went."""

    __slots__ = ("_shape", "budgets", "in_flight", "mean_s", "used_s", "window")

    def __init__(self, shape: WindowShape, now_s: float) -> None:
        self._shape = shape
        self.window = Window(shape, shape.bucket(now_s))
        self.in_flight = 0
        self.mean_s = 1.0
        self.used_s = now_s
        self.budgets: dict[BudgetPeriod, Budget] = {}

    def budget(self, per: BudgetPeriod, start_s: int) -> Budget:
        """The one of this period; that of an earlier one ends."""
        budget = self.budgets.get(per)
        if budget is None or budget.start_s != start_s:
            budget = self.budgets[per] = Budget(start_s)
        return budget

    def standing(self, budget: Budget | None, now_s: float) -> Standing:
        """With no demand on it, and with this one of its budgets."""
        newest = self.window.newest_used()
        return Standing(
            self.window.requests,
            self.window.tokens,
            self.in_flight,
            None if budget is None else budget.spent,
            0 if budget is None else budget.start_s,
            0.0 if newest is None else self._shape.gone_s(newest) - now_s,
            mean_s=self.mean_s,
        )

    def standing_against(
        self, demand: Demand, limits: Limits, budget: Budget | None, now_s: float
    ) -> Standing:
        """With how long the demand would have to wait for its window."""
        window = self.window
        requests_wait_s = tokens_wait_s = 0.0
        if limits.rpm is not None and (surplus := window.requests + 1 - limits.rpm) > 0:
            bucket = window.bucket_freeing_requests(surplus)
            requests_wait_s = 0.0 if bucket is None else self._shape.gone_s(bucket) - now_s
        if limits.tpm is not None and (surplus := window.tokens + demand.tokens - limits.tpm) > 0:
            bucket = window.bucket_freeing_tokens(surplus)
            tokens_wait_s = 0.0 if bucket is None else self._shape.gone_s(bucket) - now_s
        return self.standing(budget, now_s)._replace(
            requests_wait_s=requests_wait_s, tokens_wait_s=tokens_wait_s
        )


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
