"""What is in a request's way, and a gateway's part of a limit."""

from __future__ import annotations

import pytest

from policies.limit_standing import AccountId, Ceiling, Standing, fits, obstacle, share_of
from policies.limits import Demand, Limits

ACME = AccountId("acme")
KEY = AccountId("acme", "key", "key-1")
NOON_S = 1_700_000_000.0


def test_the_longest_wait_is_told() -> None:
    ceilings = [Ceiling(ACME, Limits(rpm=10)), Ceiling(KEY, Limits(tpm=100))]
    standings = [
        Standing(10, 0, 0, requests_wait_s=5.0),
        Standing(3, 95, 0, tokens_wait_s=9.0),
    ]
    found = obstacle(ceilings, standings, Demand(20, 20), NOON_S)
    assert (found.dimension, found.account, found.wait_s) == ("tokens", KEY, 9.0)
    assert (found.limit, found.used, found.asked) == (100, 95, 20)


def test_a_demand_that_no_wait_helps_comes_before_all_others() -> None:
    ceilings = [Ceiling(ACME, Limits(rpm=10, tpm=100))]
    standings = [Standing(10, 0, 0, requests_wait_s=50.0)]
    found = obstacle(ceilings, standings, Demand(101, 101), NOON_S)
    assert (found.dimension, found.wait_s) == ("tokens", None)


def test_a_place_comes_free_as_often_as_requests_end() -> None:
    ceilings = [Ceiling(ACME, Limits(concurrency=4))]
    found = obstacle(ceilings, [Standing(0, 0, 4, mean_s=10.0)], Demand(1, 1), NOON_S)
    assert (found.dimension, found.wait_s) == ("concurrency", 2.5)


def test_a_budget_waits_for_the_next_period() -> None:
    day_s = int(NOON_S) // 86_400 * 86_400
    ceilings = [Ceiling(ACME, Limits(budget_nusd=1000, budget_per="day"))]
    standings = [Standing(0, 0, 0, spent_nusd=990, period_start_s=day_s)]
    found = obstacle(ceilings, standings, Demand(1, 1, 11, 11), NOON_S)
    assert found.wait_s == day_s + 86_400 - NOON_S
    assert found.per == "day"
    too_dear = obstacle(ceilings, standings, Demand(1, 1, 1001, 1001), NOON_S)
    assert too_dear.wait_s is None


def test_nothing_in_the_way() -> None:
    with pytest.raises(ValueError, match="nothing"):
        obstacle([Ceiling(ACME, Limits(rpm=1))], [Standing(0, 0, 0)], Demand(1, 1), NOON_S)


def test_nothing_fits_always() -> None:
    assert fits(0, 10, 20)
    assert fits(10, 10, 0)
    assert not fits(1, 10, 10)


def test_parts_are_rounded_up() -> None:
    limits = Limits(rpm=10, tpm=1001, concurrency=1)
    part = share_of(limits, 4, Standing(1, 1, 1), None, Demand(1, 1))
    assert (part.rpm, part.tpm, part.concurrency) == (3, 251, 1)


def test_what_is_left_of_a_budget_is_divided_not_all_of_it() -> None:
    limits = Limits(budget_nusd=1000)
    own = Standing(1, 1, 1, spent_nusd=610)
    assert share_of(limits, 4, own, 600, Demand(1, 1, 1, 1)).budget_nusd == 700
    over = Standing(1, 1, 1, spent_nusd=1200)
    assert share_of(limits, 4, over, 1100, Demand(1, 1, 1, 1)).budget_nusd == 1100


def test_a_request_larger_than_a_part_is_let_in_alone() -> None:
    limits = Limits(tpm=1000)
    large = Demand(900, 900)
    assert share_of(limits, 4, Standing(0, 0, 0), None, large).tpm == 900
    assert share_of(limits, 4, Standing(1, 1, 1), None, large).tpm == 250
    beyond = Demand(2000, 2000)
    assert share_of(limits, 4, Standing(0, 0, 0), None, beyond).tpm == 1000
