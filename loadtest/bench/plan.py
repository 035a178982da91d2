"""The parts of `make bench`, run against a forebay that is started for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.bench.batching import BATCHING, BatchingFigures, measure_batching
from loadtest.bench.cache import CacheFigures, measure_cache
from loadtest.bench.campaign import Contender, Report, Tell, run_campaign, warm_up
from loadtest.bench.divergence import Divergence, measure_divergence
from loadtest.bench.gateway_cost import GatewayCost, measure_gateway
from loadtest.bench.routing import ROUTING, ROUTING_PARTS, RoutingFigures, measure_routing
from loadtest.bench.tenants import (
    RUN_S,
    TENANTS,
    TENANTS_PARTS,
    TenantsFigures,
    measure_tenants,
)
from loadtest.bench.workloads import Workload
from loadtest.forebay_server import MODEL, running_forebay
from loadtest.target import Target

PARTS = ("engine", "gateway", "divergence", "cache", ROUTING, TENANTS, BATCHING)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure: the workloads of the engine part (none: leave it out), whether the gateway's
    own cost, whether how bfloat16 diverges from float32, whether the cache's tiers, which of the
    routing and of the tenants parts, and whether the ways of batching. `run_s` is how long requests
    come in each run of the tenants parts."""

    workloads: tuple[Workload, ...]
    gateway: bool
    divergence: bool
    cache: bool
    routing: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    run_s: float = RUN_S
    batching: bool = False


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What the parts found: `reports` of the engine part (empty if it was not asked for), the other
    parts' figures (None likewise), and how long forebay took to be ready (None: not measured)."""

    start_s: float | None
    reports: tuple[Report, ...]
    gateway: GatewayCost | None
    divergence: Divergence | None
    cache: CacheFigures | None
    routing: RoutingFigures | None
    tenants: TenantsFigures | None
    batching: BatchingFigures | None


def routing_parts(names: Sequence[str]) -> tuple[str, ...]:
    """Those that are named, all of them for "routing"."""
    return tuple(part for part in ROUTING_PARTS if part in names or ROUTING in names)


def tenants_parts(names: Sequence[str]) -> tuple[str, ...]:
    """Those that are named, all of them for "tenants"."""
    return tuple(part for part in TENANTS_PARTS if part in names or TENANTS in names)


async def run_bench(
    plan: BenchPlan,
    *,
    peer: Contender | None,
    repeats: int,
    seed: int,
    tell: Tell,
) -> BenchReport:
    """Start forebay, measure it as planned (the workloads in turn with `peer` if there is one),
    and stop it. Raises CampaignError if a server cannot be measured."""
    reports: list[Report] = []
    cost: GatewayCost | None = None
    start_s: float | None = None
    if plan.gateway or plan.workloads:
        tell("starting forebay")
        async with running_forebay() as server:
            start_s = server.start_s
            target = Target("forebay", server.endpoint, MODEL)
            # The short part first: should it fail, no long measurement is lost.
            if plan.gateway:
                tell("forebay: the gateway's own time")
                await warm_up(target, seed)
                cost = await measure_gateway(target, seed)
            if plan.workloads:
                contenders = [Contender(target, server.pid), *([peer] if peer else [])]
                reports = await run_campaign(
                    contenders, plan.workloads, repeats=repeats, seed=seed, tell=tell
                )
    divergence = await measure_divergence(tell) if plan.divergence else None
    cache = await measure_cache(repeats=repeats, seed=seed, tell=tell) if plan.cache else None
    routing = None
    if plan.routing:
        routing = await measure_routing(plan.routing, repeats=repeats, seed=seed, tell=tell)
    tenants = None
    if plan.tenants:
        tenants = await measure_tenants(
            plan.tenants, rounds=repeats, run_s=plan.run_s, seed=seed, tell=tell
        )
    batching = None
    if plan.batching:
        batching = await measure_batching(rounds=repeats, seed=seed, tell=tell)
    return BenchReport(start_s, tuple(reports), cost, divergence, cache, routing, tenants, batching)
