"""Limits that gateways keep together in Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.limits.calls import Sender, reserve_arguments
from gateway.limits.script import PREFIX, TENANTS_KEY, keys_of
from gateway.limits.shared import SharedLimiter
from policies.limit_standing import AccountId, Ceiling
from policies.limit_window import WindowShape
from policies.limits import Demand, Limits
from tests.cache.valkey import Valkey, free_port, running_valkey
from tests.gateway.limits.stage import (
    ONE,
    SHORT,
    FakeLedger,
    caller,
    let_in,
    refusal_of,
    run,
    shared,
    told,
    until,
)


def field(server: Valkey, name: str, tenant: str = "acme") -> int:
    with server.client() as client:
        value = client.hget(keys_of(tenant)[0], name)
    return 0 if value is None else int(value)


async def test_gateways_share_one_limit(valkey: Valkey) -> None:
    who = caller(Limits(rpm=10, tpm=1000), key=Limits(rpm=8))
    async with shared(valkey.url) as one, shared(valkey.url) as other:
        results = await asyncio.gather(
            *[run(limiter, who) for limiter in (one, other) for _ in range(10)]
        )
        assert sum(results) == 8
        assert (one.degraded, other.degraded) == (False, False)
        error = await refusal_of(one, who)
        assert 59 <= int(error.headers["retry-after"]) <= 61
        assert error.headers["x-ratelimit-limit-requests"] == "8"
        assert error.headers["x-ratelimit-remaining-requests"] == "0"
        assert dict(one.headers(who))[b"x-ratelimit-remaining-requests"] == b"0"


async def test_one_round_trip_for_each_request(valkey: Valkey) -> None:
    who = caller(Limits(rpm=100, tpm=1000), key=Limits(rpm=80), model=Limits(concurrency=8))
    async with shared(valkey.url) as limiter:
        await run(limiter, who)
        await told(limiter)
        with valkey.client() as client:
            client.config_resetstat()
        reservation = await let_in(limiter, who)
        with valkey.client() as client:
            calls = client.info("commandstats")
        assert reservation is not None
        assert calls["cmdstat_evalsha"]["calls"] == 1
        with reservation:
            reservation.settle(1, 0)


async def test_what_is_settled_makes_room_for_others(valkey: Valkey) -> None:
    who = caller(Limits(tpm=100))
    async with shared(valkey.url) as one, shared(valkey.url) as other:
        reservation = await let_in(one, who, Demand(10, 100))
        assert reservation is not None
        assert not await run(other, who)
        with reservation:
            reservation.settle(40, 0)
            reservation.settle(90, 0)
            await told(one)
            assert await run(other, who, Demand(60, 60), tokens=60)
        assert not await run(one, who)
        await told(one, other)
        assert field(valkey, "t|u") == 100


async def test_what_is_abandoned_was_never_there(valkey: Valkey) -> None:
    ledger = FakeLedger()
    limits = Limits(rpm=1, tpm=10, concurrency=1, budget_nusd=100, budget_per="day")
    who = caller(limits)
    async with shared(valkey.url, ledger.spent) as limiter:
        for _ in range(3):
            reservation = await let_in(limiter, who, Demand(10, 10, 100, 100))
            assert reservation is not None
            with reservation:
                assert field(valkey, "t|d$") == 100
            await told(limiter)
        for name in ("t|n", "t|u", "t|c", "t|d$"):
            assert field(valkey, name) == 0
        with valkey.client() as client:
            assert client.zcard(keys_of("acme")[1]) == 0


async def test_a_refusal_says_what_is_left_without_what_was_given_back(valkey: Valkey) -> None:
    who = caller(Limits(rpm=10, tpm=1000), key=Limits(rpm=8), model=Limits(tpm=900))

    def left(limiter: SharedLimiter) -> tuple[bytes, bytes]:
        headers = dict(limiter.headers(who))
        return headers[b"x-ratelimit-remaining-requests"], headers[b"x-ratelimit-remaining-tokens"]

    async with shared(valkey.url) as limiter:
        abandoned = await let_in(limiter, who, Demand(10, 600))
        assert abandoned is not None
        with abandoned:
            assert left(limiter) == (b"7", b"400")
        assert left(limiter) == (b"8", b"1000")
        assert dict(limiter.headers(who))[b"x-ratelimit-reset-requests"] == b"0s"
        used = await let_in(limiter, who, Demand(10, 600))
        assert used is not None
        with used:
            used.settle(30, 0)
            assert left(limiter) == (b"7", b"970")
        assert left(limiter) == (b"7", b"970")


async def test_a_refused_request_spends_nothing(valkey: Valkey) -> None:
    who = caller(Limits(rpm=10, tpm=100), key=Limits(concurrency=1))
    async with shared(valkey.url) as limiter:
        reservation = await let_in(limiter, who)
        assert reservation is not None
        with reservation:
            for _ in range(5):
                assert not await run(limiter, who)
            reservation.settle(1, 0)
        await told(limiter)
        assert (field(valkey, "t|n"), field(valkey, "t|u")) == (1, 1)
        assert limiter.counts.refused["concurrency"] == 5


async def test_requests_whose_client_leaves_hold_nothing(valkey: Valkey) -> None:
    who = caller(Limits(rpm=1000, tpm=10**6, concurrency=1000))
    async with shared(valkey.url) as limiter:
        tasks = [asyncio.create_task(let_in(limiter, who, Demand(5, 50))) for _ in range(60)]
        for number, task in enumerate(tasks):
            if number % 4 == 0:
                await asyncio.sleep(0)
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        for result in done:
            if not isinstance(result, BaseException) and result is not None:
                with result:
                    pass
        assert sum(isinstance(result, asyncio.CancelledError) for result in done) > 0

        def nothing_is_held() -> bool:
            return not limiter.counts.journal and not any(
                field(valkey, name) for name in ("t|n", "t|u", "t|c")
            )

        await until(nothing_is_held)
        assert not limiter.degraded


async def test_budgets_are_summed_up_once_for_all_gateways(valkey: Valkey) -> None:
    ledger = FakeLedger(700)
    who = caller(Limits(budget_nusd=1000, budget_per="month"), key=Limits(budget_nusd=900))
    demand = Demand(1, 1, 100, 150)
    async with shared(valkey.url, ledger.spent) as one, shared(valkey.url, ledger.spent) as other:
        results = [await let_in(limiter, who, demand) for limiter in (one, other, one)]
        assert [result is not None for result in results] == [True, False, False]
        assert len(ledger.asked) == 2
        ledger.nusd = 0  # nobody asks again
        assert results[0] is not None
        with results[0]:
            results[0].settle(1, 30)
        await told(one)
        assert (field(valkey, "t|m$"), field(valkey, "k:key-1|m$")) == (730, 730)
        assert await run(other, who, demand, cost_nusd=150)


async def test_without_a_ledger_budgets_go_on_from_what_is_known(valkey: Valkey) -> None:
    ledger = FakeLedger()
    ledger.broken = True
    who = caller(Limits(budget_nusd=100, budget_per="day"))
    demand = Demand(1, 1, 60, 60)
    async with shared(valkey.url, ledger.spent) as limiter:
        assert await run(limiter, who, demand, cost_nusd=60)
        assert not await run(limiter, who, demand)
        assert limiter.degraded
        assert len(ledger.asked) == 1
        assert field(valkey, "t|d$") == 0  # a guess is nobody's but ours


async def test_a_place_is_renewed_while_it_is_held_and_expires_with_its_gateway(
    valkey: Valkey,
) -> None:
    who = caller(Limits(concurrency=2, rpm=10_000))
    async with shared(valkey.url, lease_s=0.8) as limiter:
        sender = Sender("gone", WindowShape(), 0.8)
        ceilings = [Ceiling(AccountId("acme"), who.tenant.limits)]
        with valkey.client() as client:
            rest = reserve_arguments("lost", ceilings, ONE, {}, 0.0)
            client.execute_command(*sender.call("acme", "reserve", 1, *rest))
        reservation = await let_in(limiter, who)
        assert reservation is not None
        with reservation:
            began_s = time.monotonic()
            refused = 0
            while not await run(limiter, who):  # steady traffic
                refused += 1
                assert time.monotonic() - began_s < 5
            assert refused > 0
            assert time.monotonic() - began_s > 0.5
            # more than two leases later what is held is held
            assert await run(limiter, who)
            while time.monotonic() - began_s < 2.0:
                holding = await let_in(limiter, who)
                assert holding is not None
                with holding:
                    assert not await run(limiter, who)
                    holding.settle(1, 0)
        await told(limiter)
        assert field(valkey, "t|c") == 0


async def test_a_window_ends(valkey: Valkey) -> None:
    who = caller(Limits(rpm=3))
    async with shared(valkey.url, shape=SHORT) as limiter:
        admitted_s: list[float] = []
        while len(admitted_s) < 9:
            if await run(limiter, who):
                admitted_s.append(time.monotonic())
        for first, fourth in zip(admitted_s, admitted_s[3:], strict=False):
            assert fourth - first > 0.49  # the answers', the server's are half a second apart


async def test_nothing_is_told_of_keys_and_nothing_expires(valkey: Valkey) -> None:
    who = caller(Limits(rpm=100), key=Limits(rpm=50))
    async with shared(valkey.url) as limiter:
        reservation = await let_in(limiter, who)
        assert reservation is not None
        with reservation, valkey.client() as client:
            keys = client.keys(f"{PREFIX}*")
            assert sorted(keys) == sorted(key.encode() for key in keys_of("acme"))
            assert [client.ttl(key) for key in keys] == [-1, -1]
            assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "volatile-lru"


async def test_a_full_server_evicts_kv_and_not_limits(tmp_path: Path) -> None:
    with running_valkey(tmp_path, {"maxmemory": "4mb"}) as server, server.client() as client:
        async with shared(server.url) as limiter:
            who = caller(Limits(rpm=3))
            assert await run(limiter, who)
            for number in range(400):
                client.set(f"kv-{number}", b"x" * 20_000, ex=1000)
            assert client.info("stats")["evicted_keys"] > 0
            assert [await run(limiter, who) for _ in range(3)] == [True, True, False]


async def test_both_connections_are_made_before_a_request_has_to_wait_for_one(
    valkey: Valkey,
) -> None:
    with valkey.client() as client:
        before = client.info("clients")["connected_clients"]
        async with shared(valkey.url):
            assert client.info("clients")["connected_clients"] == before + 2


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Valkey]:
    options = {"cluster-enabled": "yes", "cluster-port": str(free_port())}
    with running_valkey(tmp_path, options, tcp=True) as server, server.client() as client:
        client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        deadline_s = time.monotonic() + 10
        while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        yield server


async def test_a_cluster(cluster: Valkey) -> None:
    who = caller(Limits(rpm=3, tpm=100), key=Limits(rpm=100))
    async with shared(cluster.url, cluster=True) as limiter:
        assert [await run(limiter, who) for _ in range(4)] == [True, True, True, False]
        await told(limiter)
        with cluster.client() as client:  # named, and looked through
            await until(lambda: client.scard(TENANTS_KEY) == 1)
        assert field(cluster, "t|u") == 3
        assert not limiter.degraded


async def test_tenants_that_have_gone_quiet_are_swept(valkey: Valkey) -> None:
    async with shared(valkey.url, shape=SHORT) as limiter:
        assert await run(limiter, caller(Limits(rpm=3), tenant="busy"))
        await told(limiter)
        with valkey.client() as client:
            # one that another gateway had, long ago
            client.sadd(TENANTS_KEY, "quiet")
            client.hset(keys_of("quiet")[0], mapping={"e": "1", "t|d$": "5", "t|d@": "86400"})
            await until(lambda: client.smembers(TENANTS_KEY) == {b"busy"})
            assert not client.exists(keys_of("quiet")[0])
            assert client.exists(keys_of("busy")[0])
