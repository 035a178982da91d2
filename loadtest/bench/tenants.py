"""The tenants parts of `make bench`: what limits and promises cost, and what they bring."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from loadtest.bench.campaign import Tell
from loadtest.bench.tenants_goodput import GoodputFigures, GoodputPlan, measure_goodput
from loadtest.bench.tenants_neighbour import NeighbourFigures, NeighbourPlan, measure_neighbour
from loadtest.bench.tenants_overhead import OverheadFigures, measure_overhead

TENANTS = "tenants"
TENANTS_PARTS = ("tenants-overhead", "tenants-neighbour", "tenants-goodput")
"""What `tenants` stands for, each of which can be asked for alone."""
RUN_S = 20.0
"""How long requests come in each run whose length is free."""


@dataclass(frozen=True, slots=True)
class TenantsFigures:
    """What the parts found; None for those that were not asked for."""

    overhead: OverheadFigures | None
    neighbour: NeighbourFigures | None
    goodput: GoodputFigures | None


async def measure_tenants(
    parts: Collection[str], *, rounds: int, run_s: float, seed: int, tell: Tell
) -> TenantsFigures:
    """The parts named; `rounds` and `run_s` are those of the two that run the bundled model.
    Raises CampaignError if something cannot be measured."""
    overhead, neighbour, goodput = (part in parts for part in TENANTS_PARTS)
    alone = replace(NeighbourPlan(), alone_s=run_s)
    offered = replace(GoodputPlan(), seconds=run_s)
    return TenantsFigures(
        overhead=await measure_overhead(tell) if overhead else None,
        neighbour=await measure_neighbour(rounds=rounds, seed=seed, tell=tell, plan=alone)
        if neighbour
        else None,
        goodput=await measure_goodput(rounds=rounds, seed=seed, tell=tell, plan=offered)
        if goodput
        else None,
    )
