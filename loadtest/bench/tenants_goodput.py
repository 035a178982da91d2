"""Goodput under overload: three tenants by weight, each offering more than its share.

What the server can do is measured first, by more clients than it runs requests at once. Then
requests come at that rate and at a multiple of it, whether earlier ones are answered or not; and
at the multiple once more as one tenant's, in the order of their arrival and without promises.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from loadtest.bench.campaign import CampaignError, Tell
from loadtest.bench.tenants_load import (
    Fate,
    Offer,
    Shape,
    send,
    send_in_turn,
    side_by_side,
    undisturbed,
)
from loadtest.bench.tenants_server import BenchTenant, running_tenants
from loadtest.target import Target
from policies.slo import Slo

AT_CAPACITY, OVERLOAD, FIFO = "at capacity", "overload", "overload, first come, first served"
_EVERYBODY = "everybody"
_SHAPE = Shape(128, 32)
_PROMISE = Slo(ttft_s=2.0, tpot_s=0.15)
"""The lightest tenant has a seventh of some eight requests a second on two cores: its turn comes
about every 0.9 s, and less than two turns are no promise that it could be held to."""


@dataclass(frozen=True, slots=True)
class GoodputPlan:
    """Requests of one shape come for `seconds` in each run; `slo` is promised to every tenant.
    Offered are `overload` times what was served to `clients` in a loop for `capacity_s`, half of it
    spread by weight and half evenly, so that who offers what says nothing of who is served what.
    Clients give up after `patience_s`."""

    seconds: float = 20.0
    weights: tuple[float, ...] = (1.0, 2.0, 4.0)
    shape: Shape = _SHAPE
    slo: Slo = _PROMISE
    overload: float = 2.0
    clients: int = 24
    capacity_s: float = 10.0
    patience_s: float = 10.0

    @property
    def shares(self) -> tuple[float, ...]:
        """Each tenant's part by weight."""
        return tuple(weight / sum(self.weights) for weight in self.weights)

    @property
    def offered_shares(self) -> tuple[float, ...]:
        """Each tenant's part of what is offered."""
        even = 1 / len(self.weights)
        return tuple((share + even) / 2 for share in self.shares)


@dataclass(frozen=True, slots=True)
class GoodputRun:
    """One run. `goodput_per_s` are requests answered as promised per second of offering, `shares`
    each tenant's part of the tokens of all whole answers. `shed` and `given_up` are counts."""

    offered_per_s: float
    goodput_per_s: float
    attainment: tuple[float, ...]
    shares: tuple[float, ...]
    answered: int
    shed: int
    given_up: int


@dataclass(frozen=True, slots=True)
class GoodputFigures:
    """One of each for every round; pairs of the same index ran one right after the other."""

    capacity_per_s: tuple[float, ...]
    at_capacity: tuple[GoodputRun, ...]
    overload: tuple[GoodputRun, ...]
    fifo: tuple[GoodputRun, ...]
    plan: GoodputPlan

    @property
    def over_fifo(self) -> float | None:
        """Goodput in overload over that of first come, first served, over all rounds; infinite if
        the latter kept no promise at all, None if neither did."""
        return _over(self.overload, self.fifo)

    @property
    def over_capacity(self) -> float | None:
        """Goodput in overload over that at capacity, likewise."""
        return _over(self.overload, self.at_capacity)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of served tokens in overload, the median over rounds."""
        by_tenant = zip(*(run.shares for run in self.overload), strict=True)
        return tuple(median(shares) for shares in by_tenant)

    @property
    def worst_share(self) -> float:
        """By how much the share furthest from its weight is off, relative to it."""
        return max(
            abs(share / due - 1) for share, due in zip(self.shares, self.plan.shares, strict=True)
        )


async def measure_goodput(
    *, rounds: int, seed: int, tell: Tell, plan: GoodputPlan | None = None
) -> GoodputFigures:
    """Every round measures capacity anew; every other one has its runs in reverse. Raises
    CampaignError."""
    plan = plan or GoodputPlan()
    tell("starting forebay with three tenants by weight")
    tenants = [
        *(
            BenchTenant(_name(index), weight=weight, slo=plan.slo)
            for index, weight in enumerate(plan.weights)
        ),
        BenchTenant(_EVERYBODY),
    ]
    capacities: list[float] = []
    runs: dict[str, list[GoodputRun]] = {AT_CAPACITY: [], OVERLOAD: [], FIFO: []}
    async with running_tenants(tenants, seed) as targets:
        for turn in range(rounds):
            tell(f"goodput: what the server can do, {turn + 1} of {rounds}")
            capacities.append(
                await measure_capacity(targets[_EVERYBODY], plan, f"{seed}/{turn}/capacity")
            )
            for name in list(runs) if turn % 2 == 0 else reversed(list(runs)):
                tell(f"goodput: {name}, {turn + 1} of {rounds}")
                per_s = capacities[-1] * (1 if name == AT_CAPACITY else plan.overload)
                runs[name].append(await _offered(name, targets, plan, per_s, f"{seed}/{turn}"))
    at_capacity, overload, fifo = (tuple(found) for found in runs.values())
    return GoodputFigures(tuple(capacities), at_capacity, overload, fifo, plan)


async def measure_capacity(target: Target, plan: GoodputPlan, seed: str) -> float:
    """Requests per second of a closed loop. Raises CampaignError if one is turned away."""
    with undisturbed():
        fates = await send_in_turn(target, plan.shape, plan.clients, plan.capacity_s, seed)
    if any(fate.answer is None for fate in fates):
        raise CampaignError("goodput: a request was turned away where there was no overload")
    wall_s = max(one.ended_at_s for one in fates) - min(one.sent_at_s for one in fates)
    return len(fates) / wall_s


async def _offered(
    name: str, targets: Mapping[str, Target], plan: GoodputPlan, per_s: float, seed: str
) -> GoodputRun:
    offers = []
    for index, share in enumerate(plan.offered_shares):
        target = targets[_EVERYBODY if name == FIFO else _name(index)]
        # the same times in every run of a round, and prompts that no other run has
        draw = random.Random(f"{seed}/{index}")
        count = max(1, round(per_s * share * plan.seconds))
        at_s = sorted(draw.uniform(0, plan.seconds) for _ in range(count))
        offers.append(Offer(target, plan.shape, at_s, plan.patience_s))
    with undisturbed():
        async with side_by_side() as sent:
            tasks = [
                sent.create_task(send(offer, f"{seed}/{name}/{index}"))
                for index, offer in enumerate(offers)
            ]
    return sum_up([task.result() for task in tasks], plan)


def sum_up(fates: Sequence[Sequence[Fate]], plan: GoodputPlan) -> GoodputRun:
    """Of the tenants in order; what was offered counts, however it ended."""
    everything = [fate for own in fates for fate in own]
    kept = [sum(fate.kept(plan.slo) for fate in own) for own in fates]
    answered = [sum(fate.answer is not None for fate in own) for own in fates]
    shed = sum(fate.shed for fate in everything)
    served = sum(answered)
    return GoodputRun(
        offered_per_s=len(everything) / plan.seconds,
        goodput_per_s=sum(kept) / plan.seconds,
        attainment=tuple(
            good / count if count else 0.0 for good, count in zip(kept, answered, strict=True)
        ),
        shares=tuple(count / served if served else 0.0 for count in answered),
        answered=served,
        shed=shed,
        given_up=len(everything) - served - shed,
    )


def _over(runs: Sequence[GoodputRun], others: Sequence[GoodputRun]) -> float | None:
    ours = sum(run.goodput_per_s for run in runs)
    theirs = sum(run.goodput_per_s for run in others)
    if theirs:
        return ours / theirs
    return math.inf if ours else None


def _name(index: int) -> str:
    return f"tenant{index + 1}"
