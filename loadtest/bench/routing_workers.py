"""A worker process against an engine in the gateway's own process: the same work, in turn."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from loadtest.bench.cache_pairs import PairedRatio, cell_ratio
from loadtest.bench.campaign import CampaignError, Contender, Report, Tell, run_campaign
from loadtest.bench.cells import cells_of
from loadtest.bench.workloads import W1, W2, W3
from loadtest.forebay_server import MODEL, running_forebay
from loadtest.target import Target

WORKLOADS = (W1, W2, W3)
WORKER, IN_PROCESS = "worker process", "in-process"
_KIND = "FOREBAY_MODELS__0__REPLICAS__KIND"
_LEAST_PAIRS = 3


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """What both did, the worker first, and its ratio to the other by cell."""

    reports: tuple[Report, Report]
    ratios: Mapping[str, PairedRatio]

    @property
    def failures(self) -> list[str]:
        """Every request without a whole answer."""
        return [line for report in self.reports for line in report.failures]


async def measure_workers(*, repeats: int, seed: int, tell: Tell) -> WorkerFigures:
    """`repeats` pairs, at least three. Raises CampaignError."""
    async with AsyncExitStack() as servers:
        contenders = []
        for name, kind in ((WORKER, "process"), (IN_PROCESS, "in-process")):
            tell(f"starting forebay, {name}")
            settings = {_KIND: kind, "FOREBAY_REDIS__URL": "off"}
            server = await servers.enter_async_context(running_forebay(settings))
            contenders.append(Contender(Target(name, server.endpoint, MODEL), server.pid))
        worker, inside = await run_campaign(
            contenders, WORKLOADS, repeats=max(_LEAST_PAIRS, repeats), seed=seed, tell=tell
        )
    ratios = {}
    for workload in WORKLOADS:
        for cell in cells_of(workload):
            mine = [one for one in worker.repetitions if one.workload == workload.name]
            theirs = [one for one in inside.repetitions if one.workload == workload.name]
            if (ratio := cell_ratio(cell, mine, theirs)) is not None:
                ratios[f"{workload.name} {cell.label}"] = ratio
    if not ratios:
        why = (worker.failures + inside.failures or ["no reason given"])[0]
        raise CampaignError(f"workers: no two pairs of runs were answered; {why}")
    return WorkerFigures((worker, inside), ratios)
