"""The routing parts of `make bench`: deciding, proxying, what routing brings, and workers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from loadtest.bench.campaign import Tell
from loadtest.bench.routing_decision import DecisionFigures, measure_decision
from loadtest.bench.routing_policies import PolicyFigure, measure_policies
from loadtest.bench.routing_proxy import ProxyFigure, measure_proxy
from loadtest.bench.routing_workers import WorkerFigures, measure_workers

ROUTING = "routing"
ROUTING_PARTS = ("routing-decision", "routing-proxy", "routing-policies", "routing-workers")
"""What `routing` stands for, each of which can be asked for alone."""


@dataclass(frozen=True, slots=True)
class RoutingFigures:
    """What the parts found; None for those that were not asked for."""

    decision: DecisionFigures | None
    proxy: tuple[ProxyFigure, ...] | None
    policies: tuple[PolicyFigure, ...] | None
    workers: WorkerFigures | None

    @property
    def failures(self) -> list[str]:
        """Every request without a whole answer; in most parts the first one ends the bench."""
        return [] if self.workers is None else self.workers.failures


async def measure_routing(
    parts: Collection[str], *, repeats: int, seed: int, tell: Tell
) -> RoutingFigures:
    """The parts named. Raises CampaignError if something cannot be measured."""
    decision, proxy, policies, workers = (part in parts for part in ROUTING_PARTS)
    if decision:
        tell("hashing and deciding")
    return RoutingFigures(
        decision=await measure_decision() if decision else None,
        proxy=tuple(await measure_proxy(tell)) if proxy else None,
        policies=tuple(await measure_policies(seed, tell)) if policies else None,
        workers=await measure_workers(repeats=repeats, seed=seed, tell=tell) if workers else None,
    )
