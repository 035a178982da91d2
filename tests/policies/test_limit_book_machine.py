"""Reserving, settling and abandoning in any order, against lists of what happened."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from policies.limit_book import Granted, Holding, LimitBook
from policies.limit_standing import AccountId, BudgetId, Ceiling
from policies.limit_window import WindowShape
from policies.limits import Demand, Limits

SPAN_MS, WIDTH_MS = 6000, 1000
UNIX_S = 1_700_000_000.0
DAY_S = int(UNIX_S) // 86_400 * 86_400
SEEDED = 50
TENANT, KEY = AccountId("acme"), AccountId("acme", "key", "key-1")
LIMITS = {
    TENANT: Limits(rpm=5, tpm=100, concurrency=3, budget_nusd=1000, budget_per="day"),
    KEY: Limits(rpm=3, tpm=60, concurrency=2),
}


@dataclass
class Told:
    """One request that was let in."""

    holding: Holding
    accounts: tuple[AccountId, ...]
    at_ms: int
    tokens: int
    cost_nusd: int
    settled: bool = False
    over: bool = False


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = LimitBook(WindowShape(SPAN_MS * 1000, SPAN_MS // WIDTH_MS))
        self.book.reserve([Ceiling(TENANT, LIMITS[TENANT])], Demand(0, 0), 0.0, UNIX_S)
        self.book.seed(BudgetId(TENANT, "day", DAY_S), SEEDED, 0.0)
        self.now_ms = 0
        self.told: list[Told] = []

    @property
    def now_s(self) -> float:
        return self.now_ms / 1e3

    def used(self, account: AccountId, span_ms: int) -> tuple[int, int]:
        """Requests and tokens that came less than so long ago, exactly."""
        recent = [
            each
            for each in self.told
            if account in each.accounts and self.now_ms - each.at_ms < span_ms
        ]
        return len(recent), sum(each.tokens for each in recent)

    def places(self, account: AccountId) -> int:
        return sum(account in each.accounts and not each.over for each in self.told)

    def spent(self) -> int:
        return SEEDED + sum(each.cost_nusd for each in self.told)

    def has_room(self, accounts: tuple[AccountId, ...], demand: Demand, span_ms: int) -> bool:
        for account in accounts:
            limits = LIMITS[account]
            requests, tokens = self.used(account, span_ms)
            assert limits.rpm is not None
            assert limits.tpm is not None
            assert limits.concurrency is not None
            if requests + 1 > limits.rpm or self.places(account) + 1 > limits.concurrency:
                return False
            if demand.tokens and tokens + demand.tokens > limits.tpm:
                return False
            if limits.budget_nusd and demand.cost_nusd + self.spent() > limits.budget_nusd:
                return not demand.cost_nusd
        return True

    @rule(milliseconds=st.sampled_from([1, 50, 300, 1000, 2500, 7500]))
    def wait(self, milliseconds: int) -> None:
        self.now_ms += milliseconds

    @rule(
        with_key=st.booleans(),
        tokens=st.integers(0, 40),
        more=st.integers(0, 60),
        cost=st.integers(0, 200),
    )
    def reserve(self, with_key: bool, tokens: int, more: int, cost: int) -> None:
        accounts = (TENANT, KEY) if with_key else (TENANT,)
        demand = Demand(tokens, tokens + more, cost, cost + more)
        ceilings = [Ceiling(account, LIMITS[account]) for account in accounts]
        result = self.book.reserve(ceilings, demand, self.now_s, UNIX_S)
        if isinstance(result, Granted):
            assert self.has_room(accounts, demand, SPAN_MS)
            held = result.holding
            assert demand.tokens <= held.tokens <= demand.wanted_tokens
            assert demand.cost_nusd <= held.cost_nusd <= demand.wanted_cost_nusd
            self.told.append(Told(held, accounts, self.now_ms, held.tokens, held.cost_nusd))
        else:
            assert not self.has_room(accounts, demand, SPAN_MS + WIDTH_MS)

    @rule(data=st.data(), tokens=st.integers(0, 100), cost=st.integers(0, 300))
    def settle(self, data: st.DataObject, tokens: int, cost: int) -> None:
        running = [each for each in self.told if not each.over]
        if not running:
            return
        told = data.draw(st.sampled_from(running))
        # more than was set aside may be more than fits; that is not what is looked at here
        tokens, cost = min(tokens, told.tokens), min(cost, told.cost_nusd)
        assert self.book.settle(told.holding, tokens, cost) is not told.settled
        if not told.settled:
            told.tokens, told.cost_nusd, told.settled = tokens, cost, True

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.told:
            return
        told = data.draw(st.sampled_from(self.told))
        self.book.release(told.holding, self.now_s)
        told.over = True
        if not told.settled:
            self.told.remove(told)

    @invariant()
    def the_book_is_the_sum_of_what_happened(self) -> None:
        for account, limits in LIMITS.items():
            kept = self.book.account(account, self.now_s)
            kept.window.slide(self.book.shape.bucket(self.now_s))
            counted = [
                each
                for each in self.told
                if account in each.accounts
                and each.at_ms // WIDTH_MS >= (self.now_ms - SPAN_MS) // WIDTH_MS
            ]
            assert kept.window.requests == len(counted)
            assert kept.window.tokens == sum(each.tokens for each in counted)
            assert kept.in_flight == self.places(account)
            requests, tokens = self.used(account, SPAN_MS)
            assert limits.rpm is not None
            assert limits.tpm is not None
            assert requests <= limits.rpm
            assert tokens <= limits.tpm
        assert self.book.account(TENANT, self.now_s).budgets["day"].spent == self.spent()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
