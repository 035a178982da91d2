"""One load against one server, from its sending to a run that says what was measured."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from loadtest.live.client import run_load
from loadtest.live.progress import OnProgress
from loadtest.live.watch import Watch
from loadtest.machine import describe_machine
from loadtest.plan import Load, Session
from loadtest.record import Run
from loadtest.stats.cost import priced
from loadtest.target import Target
from policies.pricing import Price


@dataclass(frozen=True, slots=True)
class Manner:
    """How loads are measured, whatever they are. `keys` are those of tenants that have their own.
    `price` is for answers that say nothing of theirs, `usd_per_hour` what the server's machine
    costs. `command` and `settings` are kept with the run, for whoever repeats it. `on_progress` and
    `stop` are as in `run_load`."""

    command: str
    keys: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    price: Price | None = None
    usd_per_hour: float | None = None
    check_repeats: bool = False
    on_progress: OnProgress | None = None
    stop: asyncio.Event | None = None


async def measured(
    target: Target,
    load: Load,
    manner: Manner,
    *,
    warm_up: Sequence[Session] = (),
    settings: Mapping[str, str] | None = None,
) -> Run:
    """Run a load once. Its figures are only as good as the machine is quiet, this process included.

    `settings` are those of this run beside the manner's. A run that was stopped has what had ended.
    """
    at = target.endpoint
    outcome = await run_load(
        target,
        load,
        keys=manner.keys,
        warm_up=warm_up,
        watch=Watch(at),
        on_progress=manner.on_progress,
        stop=manner.stop,
        check_repeats=manner.check_repeats,
    )
    run = Run(
        name=target.name,
        kind="live",
        target=f"{at.url}, model {target.model}",
        workload=load.title,
        command=manner.command,
        began_at=outcome.began_at,
        wall_s=outcome.wall_s,
        records=outcome.records,
        tenants=load.tenants,
        settings={**manner.settings, **(settings or {})},
        machine=tuple(describe_machine()),
        timeline=outcome.timeline,
        client=outcome.client,
        usd_per_hour=manner.usd_per_hour,
        notes=outcome.notes,
    )
    if manner.price is None:
        return run
    return replace(run, records=priced(run.records, manner.price))
