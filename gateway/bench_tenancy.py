"""What it takes to hold one request to its tenant's limits and promises, part by part.

`python -m gateway.bench_tenancy --json` prints one JSON object: times by what is done. A tenant
with every limit, on itself, its key and its model, asks a model at one replica; its rows go to an
SQLite file. Nothing of it waits: times are of the processor, in the event loop's thread, but for
the writing of a row, for which others work too. With `--redis URL` limits are also reserved there;
that is one question to Redis, and the time until its answer is what a clock on the wall says.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from decimal import Decimal
from random import Random

from cache.directory import Directory
from gateway.database.opening import open_database
from gateway.demand import Ask, demand_of
from gateway.dispatch.member import Condition, Health, Member
from gateway.dispatch.prefix import UNKNOWN
from gateway.dispatch.receipt import Receipt
from gateway.dispatch.router import Router
from gateway.ledger.book import LedgerBook
from gateway.ledger.opening import open_ledger
from gateway.ledger.row import LedgerRow
from gateway.limits.local import LocalLimiter
from gateway.limits.opening import open_limiter
from gateway.limits.seeds import Seeds
from gateway.settings_tenants import DatabaseSettings
from gateway.slo.admission import Admission
from gateway.slo.windowed_book import WindowedSloBook
from gateway.state_dir import StateDir, new_key
from gateway.tenants import Caller, KeyFacts, KeyRing, Tenant, hash_key
from gateway.terms import Terms
from policies.bench_routing import LEARNED
from policies.cost import Coefficients
from policies.limits import Limits
from policies.pricing import NUSD, Price
from policies.routing import RouteRequest
from policies.routing_ttft import PredictedTtft
from policies.slo import Slo

_MODEL = "model"
_OTHER_KEYS = 1000
_LOOSE = Limits(rpm=10**8, tpm=10**11, concurrency=10**4, budget_nusd=10**6 * NUSD)
_TENANT = Tenant(
    "held", limits=_LOOSE, model_limits={_MODEL: _LOOSE}, slo=Slo(ttft_s=60.0, tpot_s=60.0)
)
_KEY = KeyFacts("key-held", _LOOSE)
_PRICE = Price(Decimal("0.10"), Decimal("0.01"), Decimal("0.40"))
_ASK = Ask(RouteRequest(prompt_tokens=128, max_tokens=16), UNKNOWN)
_HEALTHY = Health(Condition.SERVING)
_WARM_UP = 200
_REDIS_S = 2.0
_WRITTEN_S = 30.0
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds."""

    p50_us: float
    p99_us: float


class _Replica:
    """A replica that only is there. Implements `Routable`."""

    name = f"{_MODEL}/0"

    def health(self) -> Health:
        return _HEALTHY

    def coefficients(self) -> Coefficients:
        return LEARNED


class _Silent:
    """Nobody wants to know of decisions."""

    def decided(self, receipt: Receipt) -> None:
        """See `RouterObserver`."""

    def began(self, receipt: Receipt) -> None:
        """See `RouterObserver`."""

    def routed(self, model: str, replica: str, links: Sequence[bytes]) -> None:
        """See `RouterObserver`."""


class _Parts:
    """What is done for a request, in the order of its journey."""

    def __init__(self, ledger: LedgerBook) -> None:
        key = new_key()
        keys = [(hash_key(new_key()), Tenant(f"t{each}")) for each in range(_OTHER_KEYS)]
        self._ring = KeyRing([*keys, (hash_key(key), _TENANT, _KEY)])
        self._authorization = f"Bearer {key}"
        self._router: Router[_Replica] = Router(
            _MODEL, Directory(), PredictedTtft(), "predicted-ttft", Random(1), _Silent()
        )
        member = Member(
            _Replica(),
            "in-process",
            max_running=16,
            capacity=64,
            block_tokens=16,
            clock=time.monotonic,
        )
        self._router.add(member, tells_events=True)
        self._limiter = LocalLimiter(Seeds(ledger.spent))
        self._admission = Admission()
        self._book = WindowedSloBook()
        self._ledger = ledger
        self._rows = 0

    async def request(self) -> dict[str, float]:
        """One request's parts, and how long each took in microseconds."""
        watch = _Watch()
        caller = self._ring.identify(self._authorization)
        watch.note("finding the key among 1,001")
        receipt = self._router.decide(_ASK.route, _ASK.prefix)
        watch.note("asking where it would run")
        demand = demand_of([_ASK], [0], caller.tenant, _PRICE)
        watch.note("what it may use")
        reservation = await self._limiter.reserve(caller, _MODEL, demand)
        headers = reservation.headers
        watch.note("reserving it, 12 limits")
        with reservation:
            await self._admit(caller, receipt)
            watch.note("admission")
            cost = _PRICE.request_nusd(uncached_tokens=128, cached_tokens=0, output_tokens=16)
            reservation.settle(144, cost)
        watch.note("settling it")
        met = self._book.note(
            caller.tenant, _MODEL, promised=True, ttft_s=0.05, tpot_s=0.01, publish_s=0.05
        )
        watch.note("whether promises were kept")
        self._ledger.note(self._row(caller, cost, met))
        watch.note("handing a row to the ledger")
        if not headers:
            raise AssertionError("a tenant with limits is told what is left")
        return watch.finished()

    async def _admit(self, caller: Caller, receipt: Receipt) -> None:
        terms = Terms(flow=b"held", ttft_s=60.0, started_s=time.monotonic())
        await self._admission.admit(
            caller.tenant, self._router, _ASK, terms, max_queue_s=60.0, receipt=receipt
        )

    def _row(self, caller: Caller, cost_nusd: int, met: bool | None) -> LedgerRow:
        self._rows += 1
        now_s = time.time()
        return LedgerRow(
            id=f"row-{self._rows}",
            request_id=f"req-{self._rows}",
            started_s=now_s,
            finished_s=now_s,
            tenant=caller.tenant.id,
            key=caller.key.id,
            model=_MODEL,
            endpoint="chat",
            service_class="standard",
            outcome="success",
            status=200,
            streamed=True,
            prompt_tokens=128,
            cached_device_tokens=0,
            cached_dram_tokens=0,
            cached_redis_tokens=0,
            written_tokens=0,
            output_tokens=16,
            cost_nusd=cost_nusd,
            e2e_s=0.2,
            ttft_s=0.05,
            tpot_s=0.01,
            met_slo=met,
            replica=_Replica.name,
        )


class _Watch:
    """Processor time from one note to the next."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._all_us = 0.0
        self._last_ns = time.thread_time_ns()

    def note(self, what: str) -> None:
        """That is done."""
        took_us = (time.thread_time_ns() - self._last_ns) / 1e3
        self._times[what] = took_us
        self._all_us += took_us
        self._last_ns = time.thread_time_ns()

    def finished(self) -> dict[str, float]:
        """All of them, and together."""
        return {**self._times, "together": self._all_us}


async def measure(requests: int) -> dict[str, Times]:
    """Each part over so many requests."""
    async with _ledger() as ledger:
        parts = _Parts(ledger)
        for _ in range(_WARM_UP):
            await parts.request()
        await _all_written(ledger, _WARM_UP)
        taken_us: dict[str, list[float]] = {}
        gc.collect()
        gc.freeze()  # as a gateway does with what is there when it starts
        began_s = time.process_time()
        own_began_s = time.thread_time()
        try:
            for _ in range(requests):
                for what, took_us in (await parts.request()).items():
                    taken_us.setdefault(what, []).append(took_us)
        finally:
            gc.unfreeze()
        own_s = time.thread_time() - own_began_s
        await _all_written(ledger, _WARM_UP + requests)
        writing_us = (time.process_time() - began_s - own_s) / requests * 1e6
    found = {what: _times(each) for what, each in taken_us.items()}
    found["writing a row, all threads, on average"] = Times(writing_us, writing_us)
    return found


async def measure_shared(redis_url: str, requests: int) -> dict[str, Times]:
    """Reserving in Redis, one request at a time. Raises RuntimeError if Redis does not answer."""
    caller = Caller(_TENANT, _KEY)
    demand = demand_of([_ASK], [0], _TENANT, _PRICE)
    taken_us: list[float] = []

    async def nothing_spent(*_: object) -> int:
        return 0

    async with open_limiter(
        redis_url, spent=nothing_spent, gateways=lambda: 1, timeout_s=_REDIS_S
    ) as limiter:
        for _ in range(_WARM_UP + requests):
            began_s = time.perf_counter()
            with await limiter.reserve(caller, _MODEL, demand) as reservation:
                taken_us.append((time.perf_counter() - began_s) * 1e6)
                reservation.settle(demand.tokens, demand.cost_nusd)
            await asyncio.sleep(0)  # in which Redis is told
        if limiter.degraded:
            raise RuntimeError("Redis did not answer")
    return {"reserving it in Redis, with the way there": _times(taken_us[_WARM_UP:])}


@asynccontextmanager
async def _ledger() -> AsyncIterator[LedgerBook]:
    async with AsyncExitStack() as scope:
        directory = scope.enter_context(tempfile.TemporaryDirectory(prefix="forebay-bench-"))
        environ = {"FOREBAY_STATE_DIR": directory}
        database = await scope.enter_async_context(open_database(DatabaseSettings(), environ))
        yield await scope.enter_async_context(
            open_ledger(database, StateDir.open(environ), lambda: 90 * 86_400.0)
        )


async def _all_written(ledger: LedgerBook, rows: int) -> None:
    async with asyncio.timeout(_WRITTEN_S):
        while ledger.stats().written < rows:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(_POLL_S)


def _times(taken_us: Sequence[float]) -> Times:
    hundredths = statistics.quantiles(taken_us, n=100)
    return Times(p50_us=hundredths[49], p99_us=hundredths[98])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m gateway.bench_tenancy", description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--redis", metavar="URL", help="also reserve limits in this Redis")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args(arguments)
    found = asyncio.run(measure(chosen.requests))
    if chosen.redis is not None:
        found |= asyncio.run(measure_shared(chosen.redis, chosen.requests))
    if chosen.json:
        sys.stdout.write(json.dumps({what: asdict(each) for what, each in found.items()}) + "\n")
        return 0
    for what, each in found.items():
        sys.stdout.write(f"{what:<42} p50 {each.p50_us:7.1f} µs   p99 {each.p99_us:7.1f} µs\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
