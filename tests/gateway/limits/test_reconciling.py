"""Whatever is lost on the way, in the end Redis knows exactly what was let in and used."""

from __future__ import annotations

import asyncio
import random

import pytest

from gateway.limits.script import keys_of
from gateway.limits.shared import SharedLimiter
from gateway.tenants import Caller
from policies.limits import Demand, Limits
from tests.cache.relay import Relay
from tests.cache.valkey import Valkey
from tests.gateway.limits.stage import (
    FakeLedger,
    caller,
    let_in,
    relayed,
    shared,
    told,
    until,
)

NAMES = ("t|n", "t|u", "t|c", "t|d$", "k:key-1|n", "k:key-1|u", "k:key-1|c")


class Totals:
    """What was used, in truth."""

    requests = 0
    tokens = 0
    cost_nusd = 0


async def one_request(
    limiter: SharedLimiter, who: Caller, chance: random.Random, totals: Totals
) -> None:
    tokens, cost = chance.randint(1, 50), chance.randint(1, 90)
    reservation = await let_in(limiter, who, Demand(1, chance.randint(1, 60), 1, 100))
    if reservation is None:
        return
    with reservation:
        await asyncio.sleep(chance.choice([0, 0.001, 0.02, 0.3]))
        if chance.random() < 0.2:
            return
        reservation.settle(tokens, cost)
        totals.requests += 1
        totals.tokens += tokens
        totals.cost_nusd += cost
        await asyncio.sleep(chance.choice([0, 0, 0.05]))


async def trouble(chance: random.Random, server: Valkey, relay: Relay) -> None:
    """Answers that are lost, a server that stops, scripts that are forgotten."""
    for _ in range(3):
        await asyncio.sleep(chance.uniform(0.02, 0.1))
        kind = chance.choice(["delay", "freeze", "scripts", "connections"])
        if kind == "delay":
            relay.delay_s = 60.0
            await asyncio.sleep(chance.uniform(0.02, 0.4))
            relay.delay_s = 0.0
        elif kind == "freeze":
            server.freeze()
            await asyncio.sleep(chance.uniform(0.02, 0.4))
            server.thaw()
        else:
            with server.client() as client:
                if kind == "scripts":
                    client.script_flush()
                else:
                    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


@pytest.mark.parametrize("seed", range(3))
async def test_the_sums_are_exact(
    valkey: Valkey, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.limits.sharing._CONNECT_S", 0.3)
    monkeypatch.setattr("gateway.limits.sharing._LAST_RETRY_S", 0.25)
    chance = random.Random(seed)
    ledger = FakeLedger()
    limits = Limits(rpm=10**6, tpm=10**9, concurrency=25, budget_nusd=10**9, budget_per="day")
    who = caller(limits, key=Limits(rpm=10**6))
    totals = Totals()
    with relayed(valkey) as relay:
        async with (
            shared(relay.url, ledger.spent, timeout_s=0.1) as one,
            shared(valkey.url, ledger.spent, timeout_s=0.1) as other,
        ):
            troubled = asyncio.create_task(trouble(chance, valkey, relay))
            running: list[asyncio.Task[None]] = []
            while not troubled.done() or len(running) < 50:
                limiter = chance.choice([one, other])
                running.append(asyncio.create_task(one_request(limiter, who, chance, totals)))
                if chance.random() < 0.1:
                    chance.choice(running).cancel()
                await asyncio.sleep(chance.choice([0, 0.001, 0.01]))
            await asyncio.gather(*running, return_exceptions=True)
            await troubled
            await until(lambda: not (one.degraded or other.degraded), 10)
            await told(one, other)
            with valkey.client() as client:
                sums = [int(value or 0) for value in client.hmget(keys_of("acme")[0], NAMES)]
                leases = client.zcard(keys_of("acme")[1])
                records = [name for name in client.hkeys(keys_of("acme")[0]) if name[:2] == b"i|"]
    used = [totals.requests, totals.tokens, 0]
    assert sums == [*used, totals.cost_nusd, *used]
    assert (leases, records) == (0, [])
