"""What holding a tenant to its limits and promises costs: a gateway in front of a stub that answers
at once, for a tenant with every limit, a promise and prices, and for one with none.

Both are served by the same processes, in rounds that take turns, so that nothing else differs;
direct rounds say what the stub and the client take. Both have rows in the ledger: what a row costs
is among the parts, which the gateway's own bench measures in a process of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import orjson

from loadtest.bench.cache_valkey import running_valkey
from loadtest.bench.campaign import CampaignError, Tell
from loadtest.bench.closed_loop import exchange_all
from loadtest.bench.module import json_of_module
from loadtest.bench.routing_proxy import (
    SIXTEEN_EVENTS,
    WHOLE,
    ProxyCase,
    chat_body,
    complaint,
    running_stub,
)
from loadtest.forebay_server import RunningServer, running_forebay
from loadtest.process_tree import cpu_seconds
from loadtest.stats.distribution import Distribution
from loadtest.target import Target
from loadtest.wire.connection import Endpoint

AIM_US = 300.0
"""What is added to a request locally, at most, in the median."""
LOCAL, SHARED = "local", "shared, Valkey over its socket"
_DIRECT, _FREE, _HELD = "direct", "without limits", "with all limits"
_PARTS = "gateway.bench_tenancy"
_PRICED, _UNPRICED = "stub", "free"
_FREE_KEY, _HELD_KEY = "FOREBAY_LOADTEST_KEY_FREE", "FOREBAY_LOADTEST_KEY_HELD"
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class OverheadPlan:
    """So many rounds of each kind in turn, each of so many requests: one at a time, and `crowd` at
    a time. `warm_up` requests of each kind come first that do not count."""

    rounds: int = 8
    alone_requests: int = 150
    crowd_requests: int = 960
    crowd: int = 32
    warm_up: int = 300


@dataclass(frozen=True, slots=True)
class OverheadFigure:
    """One kind of answer, where limits are kept, and at what concurrency. Times are from sending a
    request to the end of its answer.

    `added_p50_ms` is what limits add, the median over pairs of rounds; `added_p99_ms` is between
    all requests of either kind. `cpu_added_s` is what they add to the gateway's CPU time per 1,000
    requests; None where the kernel does not tell.
    """

    where: str
    case: str
    concurrency: int
    direct_ms: Distribution
    free_ms: Distribution
    held_ms: Distribution
    added_p50_ms: float
    cpu_added_s: float | None

    @property
    def added_p99_ms(self) -> float:
        """By how much the slowest hundredth is slower."""
        return self.held_ms.p99 - self.free_ms.p99


@dataclass(frozen=True, slots=True)
class PartFigure:
    """One thing that is done for a request, in microseconds of its own."""

    what: str
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class OverheadFigures:
    """Whole requests, and the parts of what is added."""

    requests: tuple[OverheadFigure, ...]
    parts: tuple[PartFigure, ...]


async def measure_overhead(tell: Tell, plan: OverheadPlan | None = None) -> OverheadFigures:
    """Limits in the gateway's memory, then limits that gateways share. Raises CampaignError."""
    plan = plan or OverheadPlan()
    async with running_stub() as stub:
        requests = await _measure(LOCAL, "off", stub, plan, tell)
        with running_valkey() as valkey:
            tell("tenants: parts of what is added")
            parts = read_parts(await json_of_module(_PARTS, ("--redis", valkey.unix_url)))
            requests += await _measure(SHARED, valkey.unix_url, stub, plan, tell)
    return OverheadFigures(tuple(requests), tuple(parts))


def read_parts(found: dict[str, Any]) -> list[PartFigure]:
    """From what `gateway.bench_tenancy` prints: times by what is done."""
    return [PartFigure(what, times["p50_us"], times["p99_us"]) for what, times in found.items()]


def overhead_config(stub: Endpoint, redis_url: str) -> str:
    """A gateway with the stub as two models, one with a price, and both tenants. No limit is ever
    met: being held is what is measured, and not being refused."""
    remote = (
        f"[{{url: 'http://{stub.host}:{stub.port}{stub.base_path}', engine: openai, "
        "model: stub, shared_cache: accept, max_running: 256}]"
    )
    limits = (
        "rpm: 100000000, tpm: 100000000000, concurrency: 1000, "
        "budget_usd: {amount: 1000000, per: month}"
    )
    return (
        "models:\n"
        f"  - {{name: {_PRICED}, remote: {remote}, "
        "price: {input: 0.10, cached_input: 0.01, output: 0.40}}\n"
        f"  - {{name: {_UNPRICED}, remote: {remote}}}\n"
        f"redis: {{url: '{redis_url}'}}\n"
        "tenants:\n"
        f"  - {{id: free, keys: [{{env: {_FREE_KEY}}}]}}\n"
        "  - id: held\n"
        f"    keys: [{{env: {_HELD_KEY}, limits: {{{limits}}}}}]\n"
        "    class: interactive\n"
        "    weight: 2\n"
        f"    limits: {{{limits}, models: {{{_PRICED}: {{{limits}}}}}}}\n"
        "    slo: {ttft_ms: 10000, tpot_ms: 10000}\n"
    )


async def _measure(
    where: str, redis_url: str, stub: Endpoint, plan: OverheadPlan, tell: Tell
) -> list[OverheadFigure]:
    tell(f"tenants: a gateway in front of a stub, limits {where}")
    keys = {name: secrets.token_urlsafe(32) for name in (_FREE_KEY, _HELD_KEY)}
    async with running_forebay(keys, config=overhead_config(stub, redis_url)) as server:
        trio = _Trio(where, stub, server, keys)
        await trio.warm_up(plan)
        return [
            await trio.measure(WHOLE, 1, plan.rounds, plan.alone_requests),
            await trio.measure(SIXTEEN_EVENTS, 1, plan.rounds, plan.alone_requests),
            await trio.measure(SIXTEEN_EVENTS, plan.crowd, plan.rounds, plan.crowd_requests),
        ]


@dataclass(frozen=True, slots=True)
class _Round:
    taken_ms: tuple[float, ...]
    cpu_s: float | None


class _Trio:
    """The stub, and both tenants of a gateway in front of it."""

    def __init__(
        self, where: str, stub: Endpoint, server: RunningServer, keys: dict[str, str]
    ) -> None:
        self._where = where
        self._pid = server.pid
        free, held = (replace(server.endpoint, key=keys[name]) for name in (_FREE_KEY, _HELD_KEY))
        self._targets = {
            _DIRECT: Target(_DIRECT, stub, _PRICED, timeout_s=_TIMEOUT_S),
            _FREE: Target(_FREE, free, _UNPRICED, timeout_s=_TIMEOUT_S),
            _HELD: Target(_HELD, held, _PRICED, timeout_s=_TIMEOUT_S),
        }

    async def warm_up(self, plan: OverheadPlan) -> None:
        """First requests open connections, fill caches and begin windows."""
        for name in self._targets:
            await self._round(name, SIXTEEN_EVENTS, plan.crowd, plan.warm_up)

    async def measure(
        self, case: ProxyCase, concurrency: int, rounds: int, count: int
    ) -> OverheadFigure:
        """`rounds` of `count` requests of each kind. Raises CampaignError for an answer that is
        none."""
        by_kind: dict[str, list[_Round]] = {name: [] for name in self._targets}
        for turn in range(rounds):
            order = list(self._targets)
            for name in order if turn % 2 == 0 else reversed(order):
                by_kind[name].append(await self._round(name, case, concurrency, count))
        free, held = by_kind[_FREE], by_kind[_HELD]
        return OverheadFigure(
            where=self._where,
            case=case.name,
            concurrency=concurrency,
            direct_ms=_all_of(by_kind[_DIRECT]),
            free_ms=_all_of(free),
            held_ms=_all_of(held),
            added_p50_ms=median(
                median(with_limits.taken_ms) - median(without.taken_ms)
                for with_limits, without in zip(held, free, strict=True)
            ),
            cpu_added_s=_cpu_added_s(free, held, count),
        )

    async def _round(self, name: str, case: ProxyCase, concurrency: int, count: int) -> _Round:
        target = self._targets[name]
        body = orjson.loads(chat_body(case)) | {"model": target.model}
        request = target.endpoint.request(
            "POST", f"{target.endpoint.base_path}/chat/completions", orjson.dumps(body)
        )
        before_s = self._cpu_s(name)
        answers = await exchange_all(target, [request] * count, concurrency)
        after_s = self._cpu_s(name)
        taken_ms = []
        for answer in answers:
            if (why := complaint(answer, case)) is not None or isinstance(answer, str):
                raise CampaignError(f"{target.name}: {why}")
            taken_ms.append((answer.ended_at_s - answer.sent_at_s) * 1e3)
        if before_s is None or after_s is None:
            return _Round(tuple(taken_ms), None)
        return _Round(tuple(taken_ms), after_s - before_s)

    def _cpu_s(self, name: str) -> float | None:
        return None if name == _DIRECT else cpu_seconds(self._pid)


def _cpu_added_s(free: Sequence[_Round], held: Sequence[_Round], count: int) -> float | None:
    added = [
        with_limits.cpu_s - without.cpu_s
        for with_limits, without in zip(held, free, strict=True)
        if with_limits.cpu_s is not None and without.cpu_s is not None
    ]
    return sum(added) * 1000 / (len(added) * count) if added else None


def _all_of(rounds: Sequence[_Round]) -> Distribution:
    found = Distribution.of(one for each in rounds for one in each.taken_ms)
    if found is None:
        raise AssertionError("every round has requests")
    return found
