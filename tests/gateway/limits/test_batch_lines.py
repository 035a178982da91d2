"""Lines of batches, which are under budgets alone, beside requests that are under all limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from gateway.entrance import budget_only
from gateway.limits.local import LocalLimiter
from gateway.limits.script import keys_of
from gateway.limits.seeds import Seeds
from gateway.limits.shared import SharedLimiter
from policies.limits import Demand, Limits
from tests.cache.valkey import Valkey
from tests.gateway.limits.stage import FakeLedger, caller, let_in, refusal_of, run, shared, told

WHO = caller(
    Limits(rpm=2, tpm=100, concurrency=1, budget_nusd=1000),
    key=Limits(rpm=2, budget_nusd=1000),
    model=Limits(concurrency=1, budget_nusd=1000),
)
LINE = Demand(90, 90, 300, 300)


@pytest.fixture(params=["local", "shared"])
async def limiter(
    request: pytest.FixtureRequest, valkey: Valkey
) -> AsyncIterator[LocalLimiter | SharedLimiter]:
    async with AsyncExitStack() as scope:
        if request.param == "shared":
            yield await scope.enter_async_context(shared(valkey.url))
            return
        seeds = Seeds(FakeLedger().spent)
        scope.push_async_callback(seeds.close)
        yield LocalLimiter(seeds)


async def test_they_take_no_room_from_other_requests_but_what_they_cost(
    limiter: LocalLimiter | SharedLimiter,
) -> None:
    lines = [await let_in(limiter, budget_only(WHO), LINE) for _ in range(2)]
    for line in lines:
        assert line is not None
        with line:
            assert await run(limiter, WHO, Demand(40, 40, 100, 100), tokens=40, cost_nusd=100)
            line.settle(90, 300)
    # 800 of the 1,000 are spent
    error = await refusal_of(limiter, budget_only(WHO), LINE)
    assert error.code == "budget_exceeded"
    error = await refusal_of(limiter, WHO, Demand(1, 1, 1, 1))
    assert error.code == "rate_limit_exceeded"
    headers = dict(limiter.headers(WHO))
    assert headers[b"x-ratelimit-remaining-tokens"] == b"20"


async def test_nor_do_they_once_redis_has_forgotten_all_of_it(valkey: Valkey) -> None:
    def field(name: str) -> int:
        with valkey.client() as client:
            return int(client.hget(keys_of("acme")[0], name) or 0)

    async with shared(valkey.url) as limiter:
        line, other = await let_in(limiter, budget_only(WHO), LINE), await let_in(limiter, WHO)
        assert line is not None
        assert other is not None
        with line, other:
            assert await run(limiter, budget_only(WHO), LINE, tokens=90, cost_nusd=300)
            await told(limiter)
            with valkey.client() as client:
                client.flushall()
            for _ in range(2):
                await run(limiter, budget_only(WHO), Demand(1, 1))
                await told(limiter)
            assert [field(name) for name in ("t|n", "t|u", "t|c")] == [1, 1, 1]
            line.settle(90, 300)
        await told(limiter)
        assert [field(name) for name in ("t|n", "t|u", "t|c", "m:m|c")] == [0, 0, 0, 0]
        assert limiter.counts.memory_losses == 1
