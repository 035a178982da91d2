"""One gateway's book of limits."""

from __future__ import annotations

import pytest

from policies.limit_book import Granted, LimitBook, Refused, Unseeded
from policies.limit_standing import AccountId, BudgetId, Ceiling
from policies.limits import Demand, Limits

ACME = AccountId("acme")
KEY = AccountId("acme", "key", "key-1")
UNIX_S = 1_700_000_000.0
DAY_S = int(UNIX_S) // 86_400 * 86_400
ONE = Demand(1, 1)


def reserve(
    book: LimitBook,
    limits: Limits,
    demand: Demand = ONE,
    now_s: float = 100.0,
    gateways: int = 1,
) -> Granted | Refused | Unseeded:
    return book.reserve([Ceiling(ACME, limits)], demand, now_s, UNIX_S, gateways)


def granted(result: Granted | Refused | Unseeded) -> Granted:
    assert isinstance(result, Granted)
    return result


def refused(result: Granted | Refused | Unseeded) -> Refused:
    assert isinstance(result, Refused)
    return result


def test_a_refused_request_takes_nothing_of_any_account() -> None:
    book = LimitBook()
    ceilings = [Ceiling(ACME, Limits(rpm=10)), Ceiling(KEY, Limits(concurrency=1))]
    granted(book.reserve(ceilings, ONE, 100.0, UNIX_S))
    for _ in range(20):
        refused(book.reserve(ceilings, ONE, 100.0, UNIX_S))
    assert book.account(ACME, 100.0).window.requests == 1


def test_what_is_wanted_is_set_aside_as_far_as_there_is_room() -> None:
    book = LimitBook()
    limits = Limits(tpm=100)
    first = granted(reserve(book, limits, Demand(10, 80)))
    assert first.holding.tokens == 80
    second = granted(reserve(book, limits, Demand(10, 80)))
    assert second.holding.tokens == 20
    refused(reserve(book, limits, Demand(1, 80)))


def test_settling_gives_back_at_once_and_where_it_was_taken() -> None:
    book = LimitBook()
    limits = Limits(tpm=100)
    holding = granted(reserve(book, limits, Demand(10, 100))).holding
    assert book.settle(holding, 30, 0)
    assert not book.settle(holding, 99, 0)
    granted(reserve(book, limits, Demand(70, 70), now_s=130.0))
    assert list(book.account(ACME, 130.0).window.content()) == [(100, 1, 30), (130, 1, 70)]


def test_more_than_was_set_aside_counts_too() -> None:
    book = LimitBook()
    holding = granted(reserve(book, Limits(tpm=100), Demand(10, 50))).holding
    book.settle(holding, 120, 0)
    refused(reserve(book, Limits(tpm=100)))
    assert isinstance(reserve(book, Limits(tpm=100), Demand(0, 0)), Granted)


def test_an_abandoned_request_has_never_been() -> None:
    book = LimitBook()
    limits = Limits(rpm=1, tpm=100, concurrency=1)
    holding = granted(reserve(book, limits, Demand(100, 100))).holding
    refused(reserve(book, limits))
    book.release(holding, 101.0)
    book.release(holding, 101.0)
    account = book.account(ACME, 101.0)
    assert (account.in_flight, account.window.requests, account.window.tokens) == (0, 0, 0)


def test_the_waits_are_exact() -> None:
    book = LimitBook()
    limits = Limits(rpm=2, tpm=100)
    granted(reserve(book, limits, Demand(40, 40), now_s=100.2))
    granted(reserve(book, limits, Demand(30, 30), now_s=110.9))
    result = refused(reserve(book, limits, Demand(80, 80), now_s=120.0))
    (standing,) = result.standings
    assert standing.requests_wait_s == 161.0 - 120.0
    assert standing.tokens_wait_s == 171.0 - 120.0
    assert standing.reset_s == 171.0 - 120.0
    refused(reserve(book, limits, Demand(80, 80), now_s=170.99))
    granted(reserve(book, limits, Demand(80, 80), now_s=171.0))


def test_a_new_limit_holds_at_the_next_request_for_what_was_before() -> None:
    book = LimitBook()
    for _ in range(5):
        granted(reserve(book, Limits(rpm=100)))
    refused(reserve(book, Limits(rpm=5)))
    refused(reserve(book, Limits(rpm=100, concurrency=5)))
    granted(reserve(book, Limits(rpm=6)))


def test_a_budget_counts_from_what_was_spent_before() -> None:
    book = LimitBook()
    limits = Limits(budget_nusd=1000, budget_per="day")
    demand = Demand(1, 1, 10, 400)
    result = reserve(book, limits, demand)
    assert result == Unseeded([BudgetId(ACME, "day", DAY_S)])
    book.seed(BudgetId(ACME, "day", DAY_S), 500, 100.0)
    book.seed(BudgetId(ACME, "day", DAY_S), 0, 100.0)  # who comes second changes nothing
    holding = granted(reserve(book, limits, demand)).holding
    assert holding.cost_nusd == 400
    assert granted(reserve(book, limits, demand)).holding.cost_nusd == 100
    refused(reserve(book, limits, demand))
    book.settle(holding, 1, 150)
    assert granted(reserve(book, limits, demand)).holding.cost_nusd == 250


def test_a_guess_is_replaced_when_the_ledger_answers() -> None:
    book = LimitBook()
    limits = Limits(budget_nusd=1000, budget_per="day")
    budget = BudgetId(ACME, "day", DAY_S)
    reserve(book, limits)
    book.seed(budget, None, 100.0, ask_again_s=105.0)
    over = granted(reserve(book, limits, Demand(1, 1, 100, 100))).holding
    book.settle(over, 1, 100)
    granted(reserve(book, limits, Demand(1, 1, 200, 200), now_s=101.0))
    assert isinstance(reserve(book, limits, now_s=105.0), Unseeded)
    book.seed(
        budget, 700, 105.0
    )  # what is settled, the ledger knows; what is set aside, it does not
    assert book.account(ACME, 105.0).budgets["day"].spent == 900


def test_a_new_day_begins_with_its_own_sum() -> None:
    book = LimitBook()
    limits = Limits(budget_nusd=1000, budget_per="day")
    budget = BudgetId(ACME, "day", DAY_S)
    reserve(book, limits)
    book.seed(budget, 0, 100.0)
    late = granted(reserve(book, limits, Demand(1, 1, 900, 900))).holding
    next_day_s = DAY_S + 86_400.5
    result = book.reserve([Ceiling(ACME, limits)], ONE, 101.0, next_day_s)
    assert result == Unseeded([BudgetId(ACME, "day", DAY_S + 86_400)])
    book.seed(BudgetId(ACME, "day", DAY_S + 86_400), 0, 101.0)
    book.settle(late, 1, 950)
    assert book.account(ACME, 101.0).budgets["day"].spent == 0


def test_a_part_of_the_limits_counts_what_was_let_in_before() -> None:
    book = LimitBook()
    limits = Limits(rpm=10)
    for _ in range(2):
        granted(reserve(book, limits))
    granted(reserve(book, limits, gateways=4))
    refused(reserve(book, limits, gateways=4))
    granted(reserve(book, limits))


def test_idle_accounts_are_forgotten_and_busy_ones_are_not() -> None:
    book = LimitBook()
    for number in range(100):
        account = AccountId(f"tenant-{number}")
        result = book.reserve([Ceiling(account, Limits(rpm=1))], ONE, 100.0, UNIX_S)
        if number:
            book.release(granted(result).holding, 100.0)
    reserve(book, Limits(rpm=1), now_s=800.0)
    assert len(book) == 2
    assert book.known(AccountId("tenant-0")) is not None


@pytest.mark.parametrize("tokens", [0, 3])
def test_the_mean_duration_follows_the_newest(tokens: int) -> None:
    book = LimitBook()
    holding = granted(reserve(book, Limits(concurrency=1), now_s=100.0)).holding
    book.settle(holding, tokens, 0)
    book.release(holding, 111.0)
    assert book.account(ACME, 111.0).mean_s == pytest.approx(3.0)
