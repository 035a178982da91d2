"""One of several processes that ask for more than is allowed, with a clock of its own."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from gateway.limits import shared as shared_limits
from gateway.limits.calls import ReserveAnswer, read_reserve
from gateway.tenants import Caller
from policies.limit_window import WindowShape
from policies.limits import Demand, Limits
from tests.gateway.limits.stage import FakeLedger, caller, let_in, shared

SHAPE = WindowShape(1_000_000, 20)
RPM, TPM, PLACES, BUDGET = 40, 300, 5, 500
TOKENS, COST = 7, 3
CALLERS = {
    "requests": caller(Limits(rpm=RPM), tenant="requests"),
    "tokens": caller(Limits(tpm=TPM), tenant="tokens"),
    "places": caller(Limits(concurrency=PLACES), tenant="places"),
    "budget": caller(Limits(budget_nusd=BUDGET, budget_per="month"), tenant="budget"),
}


@dataclass
class Seen:
    """What the server said to one process: when requests were let in, by its own clock, and the
    most places that were taken of the tenant that has few."""

    admitted_us: dict[str, list[int]] = field(
        default_factory=lambda: {name: [] for name in CALLERS}
    )
    most_places: int = 0
    refused: int = 0
    degraded: bool = False


def hammer(pipe: Connection, url: str, skew_s: float, for_s: float) -> None:
    """Say that it is ready, wait for the start, ask for so long, and send what was seen."""
    own_clock = time.time
    time.time = lambda: own_clock() + skew_s
    pipe.send("ready")
    pipe.recv()
    pipe.send(asyncio.run(_ask(url, for_s)))


async def _ask(url: str, for_s: float) -> Seen:
    seen = Seen()
    said: dict[asyncio.Task[Any] | None, ReserveAnswer] = {}

    def listening(answer: Any) -> ReserveAnswer:
        read = read_reserve(answer)
        said[asyncio.current_task()] = read
        return read

    shared_limits.read_reserve = listening
    until_s = time.monotonic() + for_s

    async def ask(name: str, who: Caller) -> None:
        while time.monotonic() < until_s:
            reservation = await let_in(limiter, who, Demand(TOKENS, TOKENS, COST, COST))
            if reservation is None:
                seen.refused += 1
                await asyncio.sleep(0.002)
                continue
            with reservation:
                answer = said[asyncio.current_task()]
                seen.admitted_us[name].append(round(answer.unix_s * 1e6))
                if name == "places":
                    seen.most_places = max(seen.most_places, answer.standings[0].in_flight)
                await asyncio.sleep(0.001)
                reservation.settle(TOKENS, COST)

    ledger = FakeLedger()
    async with shared(url, ledger.spent, shape=SHAPE, timeout_s=5.0) as limiter:
        await asyncio.gather(
            *[ask(name, who) for name, who in CALLERS.items() if name != "places"],
            *[ask("places", CALLERS["places"]) for _ in range(3)],
        )
        seen.degraded = limiter.degraded or limiter.counts.outages > 0
    return seen
