"""Routers in front of the stub, in turn with forebay and with nothing in between.

What each of them costs a request that an engine would answer: chat requests of 0.6 KB, whole
answers and streams of 16 events, one at a time and 32 at once. Authentication, limits, hashing,
routing, metrics and the log are on in forebay; the routers look for the prefix of a prompt, ask for
no key, and log warnings only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from loadtest.bench.campaign import Contender
from loadtest.bench.routing_proxy import (
    MODEL,
    SIXTEEN_EVENTS,
    WHOLE,
    ProxyCase,
    ProxyPlan,
    Round,
    proxy_config,
    run_round,
    running_stub,
)
from loadtest.forebay_server import running_forebay
from loadtest.peers.running import running_peer
from loadtest.peers.workshop import Tell
from loadtest.process_tree import cpu_seconds
from loadtest.stats.distribution import Distribution
from loadtest.tables import Table, number
from loadtest.target import Target

DIRECT = "direct"
_CASES = (WHOLE, SIXTEEN_EVENTS)
_UPSTREAMS = 2
"""The least between which one can choose."""
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class RelayFigure:
    """One case at one concurrency through one server.

    Times are from sending a request to the end of its answer. `added_p50_ms` is the median over
    rounds of what its p50 lies above that of the direct round of the same turn. `cpu_s` is what the
    server's processes took per 1,000 requests; None where there is no server in between, or the
    kernel does not tell.
    """

    through: str
    case: str
    concurrency: int
    taken_ms: Distribution
    added_p50_ms: float
    per_s: float
    cpu_s: float | None


async def compare_routers(
    names: Sequence[str], *, root: Path | None, tell: Tell, plan: ProxyPlan | None = None
) -> list[RelayFigure]:
    """Straight to a stub, through forebay, and through each of the routers named. All run at once,
    the servers each before the same two stubs.

    Raises CampaignError if one cannot be started or gives an answer that is not the stub's."""
    async with AsyncExitStack() as scope:
        stubs = [await scope.enter_async_context(running_stub()) for _ in range(_UPSTREAMS)]
        contenders = [Contender(Target(DIRECT, stubs[0], MODEL, timeout_s=_TIMEOUT_S))]
        tell("starting forebay")
        server = await scope.enter_async_context(running_forebay(config=proxy_config(stubs)))
        forebay = Target("forebay", server.endpoint, MODEL, timeout_s=_TIMEOUT_S)
        contenders.append(Contender(forebay, server.pid))
        for name in names:
            tell(f"starting {name}")
            router = await scope.enter_async_context(
                running_peer(name, upstreams=stubs, root=root, tell=tell)
            )
            at = Target(name, router.target.endpoint, MODEL, timeout_s=_TIMEOUT_S)
            contenders.append(Contender(at, router.pid))
        return await measure_relaying(contenders, plan or ProxyPlan(), tell)


async def measure_relaying(
    contenders: Sequence[Contender], plan: ProxyPlan, tell: Tell
) -> list[RelayFigure]:
    """Every case at every concurrency through each contender, of which the first is the direct way.

    They take turns, and another one begins each turn. Raises CampaignError for an answer that is
    not the stub's.
    """
    for contender in contenders:
        for case in _CASES:
            await run_round(contender.target, case, plan.crowd, plan.warm_up)
    figures = []
    for case in _CASES:
        for concurrency, requests in ((1, plan.alone_requests), (plan.crowd, plan.crowd_requests)):
            tell(f"{case.name}, {concurrency} at once")
            figures += await _measure(contenders, case, concurrency, plan.rounds, requests)
    return figures


def relay_table(figures: Sequence[RelayFigure]) -> Table:
    """One row per server; a direct row first."""
    alone = min(one.concurrency for one in figures)
    crowd = max(one.concurrency for one in figures)
    cases = list(dict.fromkeys(one.case for one in figures))
    by = {(one.through, one.case, one.concurrency): one for one in figures}
    headers = ["through"]
    for case in cases:
        headers += [f"{case}: added p50 µs @{alone}", f"requests/s @{crowd}"]
        headers += [f"p99 ms @{crowd}", f"core-s/1,000 @{crowd}"]
    rows = []
    for through in dict.fromkeys(one.through for one in figures):
        row = [through]
        for case in cases:
            slow, fast = by[through, case, alone], by[through, case, crowd]
            row += [
                number(None if through == DIRECT else slow.added_p50_ms * 1e3),
                number(fast.per_s),
                number(fast.taken_ms.p99),
                number(None) if fast.cpu_s is None else f"{fast.cpu_s:.3f}",
            ]
        rows.append(tuple(row))
    return Table(tuple(headers), tuple(rows))


async def _measure(
    contenders: Sequence[Contender], case: ProxyCase, concurrency: int, rounds: int, requests: int
) -> list[RelayFigure]:
    found: dict[str, list[Round]] = {one.target.name: [] for one in contenders}
    cpu_s: dict[str, list[float | None]] = {one.target.name: [] for one in contenders}
    for turn in range(rounds):
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            name = contender.target.name
            before_s = _cpu_seconds(contender)
            found[name].append(await run_round(contender.target, case, concurrency, requests))
            after_s = _cpu_seconds(contender)
            if before_s is None or after_s is None:
                cpu_s[name].append(None)
            else:
                cpu_s[name].append(after_s - before_s)
    direct = found[contenders[0].target.name]
    return [
        _figure(name, case, concurrency, rounds_of, direct, cpu_s[name])
        for name, rounds_of in found.items()
    ]


def _figure(
    through: str,
    case: ProxyCase,
    concurrency: int,
    rounds: Sequence[Round],
    direct: Sequence[Round],
    cpu_s: Sequence[float | None],
) -> RelayFigure:
    times = [taken for one in rounds for taken in one.taken_ms]
    taken_ms = Distribution.of(times)
    if taken_ms is None:
        raise AssertionError("every round has requests")
    known_s = [one for one in cpu_s if one is not None]
    whole = len(known_s) == len(rounds)
    return RelayFigure(
        through=through,
        case=case.name,
        concurrency=concurrency,
        taken_ms=taken_ms,
        added_p50_ms=median(
            median(one.taken_ms) - median(straight.taken_ms)
            for one, straight in zip(rounds, direct, strict=True)
        ),
        per_s=median(one.per_s for one in rounds),
        cpu_s=sum(known_s) * 1e3 / len(times) if whole else None,
    )


def _cpu_seconds(contender: Contender) -> float | None:
    return None if contender.pid is None else cpu_seconds(contender.pid)
