"""Several repetitions against one server, or against two in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.bench.closed_loop import run_closed_loop
from loadtest.bench.completion import Failure
from loadtest.bench.measure import Repetition, run_once
from loadtest.bench.workloads import WARM_UP, Workload
from loadtest.process_tree import peak_rss_bytes
from loadtest.target import Target

Tell = Callable[[str], None]

_REST_S = 1.0
"""OpenMP threads spin after their last work, for 0.2 s by default, on the next server's cores."""


class CampaignError(Exception):
    """A server that cannot be measured at all; one line that says why."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A target and, if its processes are on this machine, the root of their tree."""

    target: Target
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All repetitions against one server. `peak_rss_bytes` is None if it is not known."""

    name: str
    model: str
    repetitions: tuple[Repetition, ...]
    peak_rss_bytes: int | None

    @property
    def failures(self) -> list[str]:
        """Every request without a whole answer."""
        return [line for repetition in self.repetitions for line in repetition.failures]


async def warm_up(target: Target, seed: int) -> None:
    """Let first calls allocate and compile. Raises CampaignError if one of them fails."""
    outcome = await run_closed_loop(target, WARM_UP, seed)
    for result in outcome.results:
        if isinstance(result, Failure):
            raise CampaignError(f"{target.name}: {result.reason}")


async def run_campaign(
    contenders: Sequence[Contender],
    workloads: Sequence[Workload],
    *,
    repeats: int,
    seed: int,
    tell: Tell,
) -> list[Report]:
    """Each workload `repeats` times against each contender; one Report per contender, in order.

    Contenders take turns, workload by workload, and the first of a pair goes second in the next:
    drift and warmth of the machine fall on all alike, and each waits until the threads of the one
    before have stopped spinning. Every repetition has prompts of its own, the
    same for every contender. Raises CampaignError if two have one name or a warm-up request fails.
    """
    repetitions: dict[str, list[Repetition]] = {one.target.name: [] for one in contenders}
    if len(repetitions) != len(contenders):
        raise CampaignError("two servers have the same name")
    for contender in contenders:
        tell(f"{contender.target.name}: warm-up")
        await warm_up(contender.target, seed)
    for repeat in range(repeats):
        for workload in workloads:
            turn = contenders if repeat % 2 == 0 else contenders[::-1]
            for contender in turn:
                name = contender.target.name
                tell(f"{name}: {workload.name}, {repeat + 1} of {repeats}")
                if len(contenders) > 1:
                    await asyncio.sleep(_REST_S)
                # A space of seeds for each campaign seed, so that two campaigns share none.
                repetition = await run_once(contender.target, workload, seed * 1000 + repeat)
                repetitions[name].append(repetition)
    return [
        Report(
            name=contender.target.name,
            model=contender.target.model,
            repetitions=tuple(repetitions[contender.target.name]),
            peak_rss_bytes=None if contender.pid is None else peak_rss_bytes(contender.pid),
        )
        for contender in contenders
    ]
