"""Limits that one process keeps by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from gateway.limits.local import LocalLimiter
from gateway.limits.opening import open_limiter
from gateway.limits.seeds import Seeds
from policies.limits import Demand, Limits
from tests.gateway.limits.stage import ONE, FakeLedger, caller, let_in, refusal_of, run

DAY_S = 86_400


class Clock:
    """Both clocks of a limiter."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.unix_s = 1_700_000_000.0

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.unix_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger() -> FakeLedger:
    return FakeLedger()


@pytest.fixture
async def seeds(ledger: FakeLedger) -> AsyncIterator[Seeds]:
    seeds = Seeds(ledger.spent)
    yield seeds
    await seeds.close()


@pytest.fixture
def limiter(seeds: Seeds, clock: Clock) -> LocalLimiter:
    return LocalLimiter(seeds, clock=lambda: clock.now_s, unix_clock=lambda: clock.unix_s)


async def test_who_has_no_limits_is_counted_nowhere(limiter: LocalLimiter) -> None:
    reservation = await limiter.reserve(caller(), "m", Demand(10**9, 10**9))
    with reservation:
        reservation.settle(1, 1)
    assert reservation.headers == []
    assert limiter.counts.accounts == 0


async def test_tenant_key_and_model_all_have_to_have_room(limiter: LocalLimiter) -> None:
    who = caller(Limits(rpm=10), key=Limits(rpm=3), model=Limits(rpm=2))
    assert [await run(limiter, who) for _ in range(3)] == [True, True, False]
    other_model = await limiter.reserve(who, "n", ONE)
    with other_model:
        other_model.settle(1, 0)
    error = await refusal_of(limiter, who)
    assert "with this model" in error.message or "This key" in error.message
    assert dict(other_model.headers)[b"x-ratelimit-remaining-requests"] == b"0"


async def test_the_retry_that_is_asked_for_succeeds_and_an_earlier_one_does_not(
    limiter: LocalLimiter, clock: Clock
) -> None:
    who = caller(Limits(rpm=2, tpm=100))
    assert await run(limiter, who, Demand(60, 60), tokens=60)
    clock.pass_time(7.3)
    assert await run(limiter, who, Demand(30, 30), tokens=30)
    error = await refusal_of(limiter, who, Demand(50, 50))
    wait_s = int(error.headers["retry-after"])
    assert error.headers["x-ratelimit-remaining-tokens"] == "10"
    clock.pass_time(wait_s - 1.01)
    assert not await run(limiter, who, Demand(50, 50))
    clock.pass_time(1.01)
    assert await run(limiter, who, Demand(50, 50))


async def test_refusals_spend_nothing_and_are_counted_by_kind(limiter: LocalLimiter) -> None:
    who = caller(Limits(rpm=10, tpm=100, concurrency=1))
    reservation = await limiter.reserve(who, "m", ONE)
    with reservation:
        for _ in range(5):
            assert not await run(limiter, who)
        reservation.settle(1, 0)
    assert (await refusal_of(limiter, who, Demand(101, 101))).code == "request_exceeds_limit"
    refused = limiter.counts.refused
    assert (refused["concurrency"], refused["too_large"], refused["requests"]) == (5, 1, 0)
    assert dict(limiter.headers(who))[b"x-ratelimit-remaining-requests"] == b"9"


async def test_what_is_abandoned_gives_the_request_back_too(limiter: LocalLimiter) -> None:
    who = caller(Limits(rpm=1, tpm=10, concurrency=1))
    for _ in range(5):
        reservation = await let_in(limiter, who, Demand(10, 10))
        assert reservation is not None
        with pytest.raises(RuntimeError), reservation:
            raise RuntimeError
    assert await run(limiter, who, Demand(10, 10))
    assert not await run(limiter, who)


async def test_a_reload_holds_at_the_next_request(limiter: LocalLimiter) -> None:
    for _ in range(3):
        assert await run(limiter, caller(Limits(rpm=100)))
    assert not await run(limiter, caller(Limits(rpm=3)))
    assert await run(limiter, caller(Limits(rpm=4)))


async def test_a_budget_begins_with_what_the_ledger_says_and_asks_it_once(
    limiter: LocalLimiter, ledger: FakeLedger, clock: Clock
) -> None:
    ledger.nusd = 900
    ledger.may_answer.clear()
    who = caller(Limits(budget_nusd=1000, budget_per="day"), key=Limits(budget_nusd=10**6))
    demand = Demand(1, 1, 50, 50)
    waiting = [asyncio.create_task(let_in(limiter, who, demand)) for _ in range(5)]
    await ledger.was_asked.wait()
    ledger.may_answer.set()
    results = await asyncio.gather(*waiting)
    assert sum(result is not None for result in results) == 2
    day_s = clock.unix_s // DAY_S * DAY_S
    assert ledger.asked[0] == ("acme", None, None, day_s)
    assert [key for _, key, _, _ in ledger.asked] == [None, "key-1"]


async def test_a_refused_budget_waits_for_midnight(
    limiter: LocalLimiter, ledger: FakeLedger, clock: Clock
) -> None:
    ledger.nusd = 1000
    who = caller(Limits(budget_nusd=1000, budget_per="day"))
    demand = Demand(1, 1, 1, 1)
    error = await refusal_of(limiter, who, demand)
    assert error.code == "budget_exceeded"
    clock.pass_time(int(error.headers["retry-after"]))
    ledger.nusd = 0
    assert await run(limiter, who, demand)
    assert await run(limiter, who, Demand(1, 1, 0, 0))


async def test_a_request_that_leaves_does_not_end_the_question_for_others(
    limiter: LocalLimiter, ledger: FakeLedger
) -> None:
    ledger.may_answer.clear()
    who = caller(Limits(budget_nusd=1000))
    leaving, staying = (asyncio.create_task(let_in(limiter, who)) for _ in range(2))
    await ledger.was_asked.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    ledger.may_answer.set()
    assert await staying is not None
    assert len(ledger.asked) == 1


async def test_without_a_ledger_it_goes_on_and_says_so_once(
    limiter: LocalLimiter, ledger: FakeLedger
) -> None:
    ledger.broken = True
    who = caller(Limits(budget_nusd=100))
    with capture_logs() as logs:
        for _ in range(2):
            assert await run(limiter, who, Demand(1, 1, 50, 50), cost_nusd=50)
        assert not await run(limiter, who, Demand(1, 1, 50, 50))
    assert len(ledger.asked) == 1
    assert limiter.degraded
    assert limiter.counts.ledger_failures == 1
    assert (b"x-forebay-limits", b"degraded") in limiter.headers(who)
    assert len(logs) == 1
    assert "password" not in str(logs)


async def test_processes_without_redis_share_the_limits(seeds: Seeds) -> None:
    limiter = LocalLimiter(seeds, gateways=lambda: 4)
    who = caller(Limits(rpm=10))
    assert [await run(limiter, who) for _ in range(4)] == [True, True, True, False]
    assert dict(limiter.headers(who))[b"x-ratelimit-limit-requests"] == b"3"


async def test_opening_without_redis() -> None:
    async with open_limiter(None, spent=FakeLedger().spent, gateways=lambda: 1) as limiter:
        assert isinstance(limiter, LocalLimiter)
        assert await run(limiter, caller(Limits(rpm=1)))
        assert not limiter.degraded
