"""A noisy neighbour: one tenant queues long prompts at once, another sends a short one a second.

Everybody is measured alone first. Then both run together, as tenants of their classes, and as one
tenant's requests in the order of their arrival, which is what a gateway without tenants does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.bench.campaign import CampaignError, Tell
from loadtest.bench.tenants_load import Fate, Offer, Shape, send, side_by_side, undisturbed
from loadtest.bench.tenants_server import BenchTenant, running_tenants
from loadtest.stats.distribution import Distribution
from loadtest.target import Target
from policies.slo import Slo

ALONE, TOGETHER, FIFO = "alone", "together", "first come, first served"
_NOISY, _QUIET, _EVERYBODY = "noisy", "quiet", "everybody"
_LONG, _SHORT = Shape(1024, 8), Shape(128, 16)
_PROMISE = Slo(ttft_s=0.5, tpot_s=0.12)
_ENOUGH = 3600
"""Short requests that are ready to be sent: more than are."""


@dataclass(frozen=True, slots=True)
class NeighbourPlan:
    """`long_requests` of one tenant at once, and `per_s` of the other, which begin `lead_s` later
    and go on until the last long one is answered; alone they go on for `alone_s`. `slo` is what the
    other was promised."""

    long_requests: int = 200
    long: Shape = _LONG
    short: Shape = _SHORT
    per_s: float = 1.0
    lead_s: float = 1.0
    alone_s: float = 20.0
    slo: Slo = _PROMISE


@dataclass(frozen=True, slots=True)
class NeighbourFigure:
    """One arrangement, over all its rounds. `quiet_ttft_ms` is the short requests' (None where
    there were none), `attainment` the share of them that was answered as promised, shed ones not;
    `noisy_tokens_per_s` are the long requests' prompt and output tokens over the time until the
    last of them was answered, one figure for each round."""

    arrangement: str
    quiet_ttft_ms: Distribution | None
    attainment: float | None
    noisy_tokens_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class NeighbourFigures:
    """All three arrangements."""

    alone: NeighbourFigure
    together: NeighbourFigure
    fifo: NeighbourFigure
    plan: NeighbourPlan


async def measure_neighbour(
    *, rounds: int, seed: int, tell: Tell, plan: NeighbourPlan | None = None
) -> NeighbourFigures:
    """Every round has all arrangements, every other one in reverse. Raises CampaignError."""
    plan = plan or NeighbourPlan()
    tell("starting forebay with a noisy tenant and a quiet one")
    runs: dict[str, list[_Run]] = {ALONE: [], TOGETHER: [], FIFO: []}
    async with running_tenants(_tenants(plan), seed) as targets:
        for turn in range(rounds):
            for arrangement in list(runs) if turn % 2 == 0 else reversed(list(runs)):
                tell(f"neighbour: {arrangement}, {turn + 1} of {rounds}")
                run = await _arranged(arrangement, targets, plan, f"{seed}/{turn}/{arrangement}")
                runs[arrangement].append(run)
    alone, together, fifo = (sum_up(name, found, plan) for name, found in runs.items())
    return NeighbourFigures(alone, together, fifo, plan)


def _tenants(plan: NeighbourPlan) -> list[BenchTenant]:
    return [
        BenchTenant(_NOISY, "standard"),
        BenchTenant(_QUIET, "interactive", slo=plan.slo),
        BenchTenant(_EVERYBODY, "standard"),
    ]


@dataclass(frozen=True, slots=True)
class _Run:
    noisy: Sequence[Fate]
    quiet: Sequence[Fate]


async def _arranged(
    arrangement: str, targets: Mapping[str, Target], plan: NeighbourPlan, seed: str
) -> _Run:
    noisy, quiet = targets[_NOISY], targets[_QUIET]
    if arrangement == FIFO:
        noisy = quiet = targets[_EVERYBODY]
    long = Offer(noisy, plan.long, [0.0] * plan.long_requests)
    with undisturbed():
        if arrangement == ALONE:
            short = _short(quiet, plan, round(plan.alone_s * plan.per_s))
            return _Run(
                noisy=await send(long, f"{seed}/long"), quiet=await send(short, f"{seed}/short")
            )
        return await _both(long, _short(quiet, plan, _ENOUGH), seed)


def _short(target: Target, plan: NeighbourPlan, count: int) -> Offer:
    return Offer(target, plan.short, [plan.lead_s + at / plan.per_s for at in range(count)])


async def _both(long: Offer, short: Offer, seed: str) -> _Run:
    over = asyncio.Event()
    async with side_by_side() as running:
        quiet = running.create_task(send(short, f"{seed}/short", over))
        noisy = await send(long, f"{seed}/long")
        over.set()
    return _Run(noisy, quiet.result())


def sum_up(arrangement: str, runs: Sequence[_Run], plan: NeighbourPlan) -> NeighbourFigure:
    """Over all rounds. Raises CampaignError if a long request was turned away: then there was no
    queue."""
    quiet = [fate for run in runs for fate in run.quiet]
    if any(fate.answer is None for run in runs for fate in run.noisy):
        raise CampaignError("neighbour: a long request was turned away instead of queued")
    return NeighbourFigure(
        arrangement,
        Distribution.of(fate.answer.ttft_s * 1e3 for fate in quiet if fate.answer is not None),
        sum(fate.kept(plan.slo) for fate in quiet) / len(quiet) if quiet else None,
        tuple(_tokens_per_s(run.noisy, plan.long) for run in runs),
    )


def _tokens_per_s(fates: Sequence[Fate], shape: Shape) -> float:
    wall_s = max(fate.ended_at_s for fate in fates) - min(fate.sent_at_s for fate in fates)
    return len(fates) * shape.tokens / wall_s
