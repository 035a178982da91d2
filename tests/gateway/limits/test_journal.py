"""What is to be told after an outage, and that it stays small."""

from __future__ import annotations

from gateway.limits.calls import BudgetPart, Count, Spend
from gateway.limits.journal import Journal
from policies.limit_window import WindowShape

BUDGET = BudgetPart("t", "d", 86_400)


def test_requests_are_summed_up_by_account_and_second() -> None:
    journal = Journal(WindowShape())
    for bucket, tokens in ((100, 5), (100, 6), (101, 7)):
        journal.count(["t", "k:1"], bucket, 1, tokens)
    journal.spend([BUDGET], 30, 100.2)
    journal.spend([BUDGET], 40, 100.9)
    journal.spend([BUDGET], 0, 105.0)
    assert len(journal) == 5
    assert journal.drain() == [
        Count("t", 101.0, 2, 11),
        Count("t", 102.0, 1, 7),
        Count("k:1", 101.0, 2, 11),
        Count("k:1", 102.0, 1, 7),
        Spend(BUDGET, 70, 101.0),
    ]
    assert len(journal) == 0
    assert journal.drain() == []


def test_hours_without_redis_are_no_more_than_a_few_minutes_of_them() -> None:
    journal = Journal(WindowShape())
    for second in range(10_000):
        journal.count(["t"], second, 1, 2)
        journal.spend([BUDGET], 3, float(second))
    assert len(journal) < 200
    told = journal.drain()
    assert sum(each.cost_nusd for each in told if isinstance(each, Spend)) == 3 * 10_000
    recent = [each for each in told if isinstance(each, Count) and each.until_s > 9_940]
    assert sum(each.requests for each in recent) == 60


def test_what_is_counted_anew_replaces_what_was_noted() -> None:
    journal = Journal(WindowShape())
    journal.count(["t"], 100, 1, 5)
    journal.recount("t", [(99, 2, 3), (100, 0, 0)])
    assert journal.drain() == [Count("t", 100.0, 2, 3)]
