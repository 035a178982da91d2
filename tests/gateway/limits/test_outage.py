"""Redis goes away, stops, forgets, and comes back."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.limits.limiter import Reservation
from gateway.limits.script import keys_of
from gateway.limits.shared import SharedLimiter
from gateway.tenants import Caller
from policies.limits import Demand, Limits
from tests.cache.relay import relaying
from tests.cache.valkey import Valkey, running_valkey
from tests.gateway.limits.stage import (
    ONE,
    SHORT,
    FakeLedger,
    caller,
    let_in,
    refusal_of,
    relayed,
    run,
    shared,
    told,
    until,
)

TIMEOUT_S = 0.15


def kept(server: Valkey, *names: str) -> list[int]:
    with server.client() as client:
        return [int(value or 0) for value in client.hmget(keys_of("acme")[0], names)]


async def lost(limiter: SharedLimiter, who: Caller) -> None:
    """Ask until it is noticed."""
    await run(limiter, who)
    assert limiter.degraded


async def back(*limiters: SharedLimiter) -> None:
    await until(lambda: not any(limiter.degraded for limiter in limiters), 10)
    await told(*limiters)


async def admitted(
    scope: AsyncExitStack, limiter: SharedLimiter, who: Caller, demand: Demand = ONE
) -> list[Reservation]:
    """As many as are let in, held until the scope ends."""
    held = []
    while (reservation := await let_in(limiter, who, demand)) is not None:
        held.append(scope.enter_context(reservation))
    return held


async def test_alone_each_gateway_keeps_to_its_part_and_reports_all_of_it(
    valkey: Valkey,
) -> None:
    who = caller(Limits(rpm=20, tpm=2000, concurrency=20))
    demand = Demand(10, 50)
    async with (
        shared(valkey.url, gateways=2, timeout_s=TIMEOUT_S) as one,
        shared(valkey.url, gateways=2, timeout_s=TIMEOUT_S) as other,
    ):
        for limiter, times in ((one, 6), (other, 2)):
            for _ in range(times):
                assert await run(limiter, who, demand, tokens=20)
        await told(one, other)
        valkey.freeze()
        try:
            results = {
                limiter: [await run(limiter, who, demand, tokens=30) for _ in range(12)]
                for limiter in (one, other)
            }
            # ten each, of which the last minute's count
            assert sum(results[one]) == 4
            assert sum(results[other]) == 8
            error = await refusal_of(one, who, demand)
            assert error.headers["x-forebay-limits"] == "degraded"
            assert error.headers["x-ratelimit-limit-requests"] == "10"
            assert (b"x-forebay-limits", b"degraded") in one.headers(who)
            assert one.counts.journal > 0
        finally:
            valkey.thaw()
        await back(one, other)
        # what each had asked just before it noticed has been undone, all else is there once
        assert kept(valkey, "t|n", "t|u", "t|c") == [20, 8 * 20 + 12 * 30, 0]
        assert one.counts.outages == 1
        assert not await run(other, who, demand)


async def test_a_dead_redis_costs_one_wait_and_then_nothing(valkey: Valkey) -> None:
    who = caller(Limits(rpm=1000))
    async with shared(valkey.url, timeout_s=TIMEOUT_S) as limiter:
        valkey.freeze()
        try:
            began_s = time.monotonic()
            await lost(limiter, who)
            assert TIMEOUT_S <= time.monotonic() - began_s < 5 * TIMEOUT_S
            began_s = time.monotonic()
            for _ in range(50):
                assert await run(limiter, who)
            assert time.monotonic() - began_s < TIMEOUT_S
        finally:
            valkey.thaw()


async def test_requests_under_way_keep_their_places_over_an_outage(valkey: Valkey) -> None:
    ledger = FakeLedger()
    limits = Limits(rpm=100, tpm=10_000, concurrency=4, budget_nusd=10_000, budget_per="day")
    who = caller(limits, key=Limits(concurrency=100))
    demand = Demand(10, 100, 10, 100)
    async with shared(valkey.url, ledger.spent, timeout_s=TIMEOUT_S, gateways=1) as limiter:
        async with AsyncExitStack() as scope:
            before = [await let_in(limiter, who, demand) for _ in range(3)]
            assert all(before)
            for held in before:
                assert held is not None
                scope.enter_context(held)
            valkey.freeze()
            try:
                await lost(limiter, who)
                during = await admitted(scope, limiter, who, demand)
                assert len(during) == 1
                assert before[0] is not None
                before[0].settle(40, 40)
                during[0].settle(70, 70)
            finally:
                valkey.thaw()
            await back(limiter)
            # one token and no cost is of the request by which the outage was noticed
            assert kept(valkey, "t|n", "t|u", "t|c", "k:key-1|c") == [5, 40 + 200 + 70 + 1, 4, 4]
            assert kept(valkey, "t|d$") == [40 + 200 + 70]
            assert not await run(limiter, who, demand)
            for held in before:
                assert held is not None
                held.settle(50, 50)
        await told(limiter)
        assert kept(valkey, "t|n", "t|u", "t|c", "t|d$") == [5, 40 + 100 + 70 + 1, 0, 210]


async def test_what_redis_carries_out_too_late_comes_to_nothing(valkey: Valkey) -> None:
    who = caller(Limits(rpm=1000, tpm=10**6, concurrency=1000))
    async with shared(valkey.url, timeout_s=TIMEOUT_S) as limiter:
        assert await run(limiter, who)
        await told(limiter)
        valkey.freeze()
        try:
            tasks = [asyncio.create_task(run(limiter, who)) for _ in range(40)]
            assert all(await asyncio.gather(*tasks))
        finally:
            valkey.thaw()
        await back(limiter)
        assert kept(valkey, "t|n", "t|u", "t|c") == [41, 41, 0]
        with valkey.client() as client:
            assert client.zcard(keys_of("acme")[1]) == 0


async def test_a_redis_that_comes_back_empty_is_told_of_the_last_minute(tmp_path: Path) -> None:
    ledger = FakeLedger()
    limits = Limits(rpm=20, tpm=2000, concurrency=3, budget_nusd=1000, budget_per="day")
    who = caller(limits)
    demand = Demand(10, 10, 10, 10)
    with running_valkey(tmp_path) as server:
        async with (
            shared(server.url, ledger.spent, timeout_s=TIMEOUT_S) as one,
            shared(server.url, ledger.spent, timeout_s=TIMEOUT_S) as other,
        ):
            for limiter in (one, one, one, other, other):
                assert await run(limiter, who, demand, tokens=10, cost_nusd=10)
            held = await let_in(one, who, demand)
            assert held is not None
            with held:
                await told(one, other)
                ledger.nusd = 50  # what is over, it knows
                server.kill()
                for limiter in (one, other):
                    assert await run(limiter, who, demand, tokens=10, cost_nusd=10)
                ledger.nusd = 70
                server.start()
                await back(one, other)
                assert kept(server, "t|n", "t|u", "t|c") == [8, 80, 1]
                assert await run(other, who, demand, tokens=10, cost_nusd=10)
                await told(other)
                assert kept(server, "t|n", "t|u", "t|c", "t|d$") == [9, 90, 1, 80]
                held.settle(5, 5)
            await told(one)
            assert kept(server, "t|n", "t|u", "t|c", "t|d$") == [9, 85, 0, 85]


async def test_a_redis_that_forgets_while_it_runs(valkey: Valkey) -> None:
    who = caller(Limits(rpm=10, tpm=1000, concurrency=5))
    demand = Demand(10, 10)
    async with shared(valkey.url) as one, shared(valkey.url) as other:
        held = await let_in(one, who, demand)
        assert held is not None
        with held:
            for limiter in (one, one, other):
                assert await run(limiter, who, demand, tokens=10)
            await told(one, other)
            with valkey.client() as client:
                client.flushall()
            results = []
            for limiter in (other, one, other, one, other, one, other, one):
                results.append(await run(limiter, who, demand, tokens=10))
                await told(one, other)
            assert sum(results) == 6
            assert kept(valkey, "t|n", "t|u", "t|c") == [10, 100, 1]
            held.settle(4, 0)
        await told(one)
        assert kept(valkey, "t|n", "t|u", "t|c") == [10, 94, 0]
        assert one.counts.memory_losses == 1
        assert not one.degraded


async def test_scripts_that_are_flushed_are_sent_again(valkey: Valkey) -> None:
    who = caller(Limits(rpm=10))
    async with shared(valkey.url) as limiter:
        for _ in range(3):
            assert await run(limiter, who)
            with valkey.client() as client:
                client.script_flush()
        await told(limiter)
        assert not limiter.degraded
        assert kept(valkey, "t|n", "t|c") == [3, 0]


@pytest.mark.parametrize("blocked", ["-evalsha -eval", "-@all +ping"])
async def test_a_server_that_runs_no_scripts_is_done_without(valkey: Valkey, blocked: str) -> None:
    who = caller(Limits(rpm=4))
    with valkey.client() as client:
        rules = ["on", "nopass", "~*", "&*", "+@all", *blocked.split()]
        client.execute_command("ACL", "SETUSER", "default", "reset", *rules)
    with capture_logs() as logs:
        async with shared(valkey.url, gateways=2) as limiter:
            assert limiter.degraded
            assert [await run(limiter, who) for _ in range(3)] == [True, True, False]
    assert len(logs) == 1
    assert "NOPERM" in logs[0]["reason"] or "NoPermission" in logs[0]["reason"]


async def test_a_redis_that_is_not_there_yet(tmp_path: Path) -> None:
    server = Valkey(tmp_path)
    who = caller(Limits(rpm=10, concurrency=5))
    async with shared(server.url, gateways=2) as limiter:
        held = await let_in(limiter, who)
        assert held is not None
        with held:
            assert await run(limiter, who)
            server.start()
            try:
                await back(limiter)
                assert kept(server, "t|n", "t|u", "t|c") == [2, 2, 1]
            finally:
                server.kill()


async def test_who_thinks_itself_alone_in_an_outage_is_not_believed(valkey: Valkey) -> None:
    who = caller(Limits(rpm=8))
    size, asked = 4, 0

    def gateways() -> int:
        nonlocal asked
        asked += 1
        return size

    async with shared(valkey.url, gateways=gateways, timeout_s=TIMEOUT_S, lease_s=0.3) as limiter:
        await until(lambda: asked > 2)
        valkey.freeze()
        try:
            size = 1
            assert [await run(limiter, who) for _ in range(3)] == [True, True, False]
        finally:
            valkey.thaw()


async def test_answers_that_are_lost_on_the_way_are_undone(valkey: Valkey) -> None:
    ledger = FakeLedger()
    who = caller(Limits(rpm=100, concurrency=10, budget_nusd=10_000, budget_per="day"))
    demand = Demand(1, 1, 100, 100)
    with relayed(valkey) as relay:
        async with shared(relay.url, ledger.spent, timeout_s=TIMEOUT_S) as limiter:
            assert await run(limiter, who, demand, cost_nusd=100)
            await told(limiter)
            relay.delay_s = 60.0
            await lost(limiter, who)
            assert kept(valkey, "t|n", "t|c") == [2, 1]
            assert await run(limiter, who, demand, cost_nusd=100)
            relay.delay_s = 0.0
            await back(limiter)
            assert kept(valkey, "t|n", "t|u", "t|c", "t|d$") == [3, 3, 0, 200]


async def test_costs_that_the_ledger_knows_are_not_counted_again_by_who_comes_back_late(
    valkey: Valkey,
) -> None:
    ledger = FakeLedger()
    who = caller(Limits(budget_nusd=10_000, budget_per="day"))
    demand = Demand(1, 1, 100, 100)
    with relayed(valkey) as relay:
        async with (
            shared(relay.url, ledger.spent, timeout_s=TIMEOUT_S, shape=SHORT) as late,
            shared(valkey.url, ledger.spent, shape=SHORT) as other,
        ):
            assert await run(late, who, demand, cost_nusd=100)
            await told(late)
            relay.delay_s = 60.0
            await lost(late, who)
            assert await run(late, who, demand, cost_nusd=100)
            await asyncio.sleep(0.1)  # two buckets
            with valkey.client() as client:
                client.flushall()
            ledger.nusd = 200
            assert await run(other, who, demand, cost_nusd=50)
            await told(other)
            # after the other one has summed up, what is settled is in no sum
            await asyncio.sleep(0.1)
            assert await run(late, who, demand, cost_nusd=100)
            relay.delay_s = 0.0
            await back(late, other)
            assert kept(valkey, "t|d$") == [350]


async def test_a_place_that_was_given_to_others_meanwhile_is_counted_again(
    valkey: Valkey,
) -> None:
    ledger = FakeLedger()
    who = caller(Limits(concurrency=1, tpm=1000, budget_nusd=10_000, budget_per="day"))
    demand = Demand(100, 100, 100, 100)
    with relayed(valkey) as relay:
        async with (
            shared(relay.url, ledger.spent, timeout_s=TIMEOUT_S, lease_s=0.4) as cut_off,
            shared(valkey.url, ledger.spent) as other,
        ):
            held = await let_in(cut_off, who, demand)
            assert held is not None
            with held:
                relay.delay_s = 60.0
                await lost(cut_off, caller(Limits(rpm=1), tenant="another"))
                began_s = time.monotonic()
                while not await run(other, who, demand, tokens=10, cost_nusd=10):
                    assert time.monotonic() - began_s < 5
                await told(other)
                assert kept(valkey, "t|n", "t|u", "t|c", "t|d$") == [2, 110, 0, 10]
                relay.delay_s = 0.0
                await back(cut_off)
                assert kept(valkey, "t|n", "t|u", "t|c", "t|d$") == [2, 110, 1, 110]
                assert not await run(other, who, demand)
                held.settle(30, 30)
            await told(cut_off)
            assert kept(valkey, "t|n", "t|u", "t|c", "t|d$") == [2, 40, 0, 40]


async def test_a_server_that_takes_nothing_more_is_told_when_it_does(valkey: Valkey) -> None:
    who = caller(Limits(rpm=10_000, tpm=10**6))
    async with shared(valkey.url, gateways=1) as limiter:
        assert await run(limiter, who)
        await told(limiter)
        with valkey.client() as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "1")
            await lost(limiter, who)
            until_s = time.monotonic() + 1.0  # several probes, each of which finds it so
            requests = 2
            while time.monotonic() < until_s:
                assert await run(limiter, who)
                requests += 1
                await asyncio.sleep(0.001)
            assert requests > 100
            assert limiter.counts.journal < 20
            assert limiter.counts.outages == 1
            client.config_set("maxmemory", "0")
        await back(limiter)
        assert kept(valkey, "t|n", "t|u", "t|c") == [requests, requests, 0]


async def test_a_name_that_leads_to_another_server_is_followed(
    valkey: Valkey, tmp_path: Path
) -> None:
    """One that was failed over from answers on kept connections, and takes no writes."""
    who = caller(Limits(rpm=20))
    with running_valkey(tmp_path) as other, relaying(valkey.socket_path) as name:
        async with shared(name.url, timeout_s=TIMEOUT_S) as limiter:
            assert await run(limiter, who)
            name.target = other.socket_path
            with valkey.client() as client:
                client.config_set("min-replicas-to-write", 1)
            await lost(limiter, who)
            await back(limiter)
            assert await run(limiter, who)
            await told(limiter)
            assert kept(other, "t|n")[0] > 0
