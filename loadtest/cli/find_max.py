"""`loadtest find-max`: the largest rate at which promises hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from loadtest.attainment import promising
from loadtest.cli import options
from loadtest.cli.errors import FAILED, INTERRUPTED, finished, mistakes, say, stop
from loadtest.cli.results import check_writable, keep, progress_bar
from loadtest.cli.wanted import Pace, Wanted, entry_keys, manner_of, slo_of, wanted
from loadtest.contenders import Source, checked, opened
from loadtest.find_max import FoundMax, Measure
from loadtest.find_max import find_max as search
from loadtest.live.interrupt import stopped_by_interrupt
from loadtest.measuring import Manner, measured
from loadtest.plan import Session
from loadtest.record import Run
from loadtest.stopping import StoppedError
from loadtest.target import Target
from loadtest.vocabulary import DEFAULT_VOCABULARY

_SEEDS_OF_A_SEARCH = 1000
_USUAL_SECONDS = 60.0


def find_max(
    server: Annotated[
        str,
        typer.Argument(
            help="A URL; or forebay, a .yaml file for it, or peer:NAME, to be started here."
        ),
    ] = options.DEFAULT_SERVER,
    workload: options.WorkloadName = None,
    settings: options.Settings = None,
    plan: options.PlanFile = None,
    start_rate: Annotated[
        float,
        typer.Option(
            min=1e-3, help="Where to begin: sessions per second; of a plan, how many times as fast."
        ),
    ] = 1.0,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="How long requests come in each run; 60 if left out."),
    ] = None,
    arrivals: Annotated[
        str | None, typer.Option(help="poisson (if left out), constant or gamma.")
    ] = None,
    cv: options.Cv = None,
    precision: Annotated[
        float, typer.Option(min=0.005, max=0.5, help="How narrow the gap may be, of the rate.")
    ] = 0.05,
    most_runs: Annotated[
        int, typer.Option("--max-runs", min=2, max=_SEEDS_OF_A_SEARCH, help="No more runs than.")
    ] = 30,
    model: options.Model = None,
    key: options.Key = None,
    ttft_ms: options.TtftMs = None,
    tpot_ms: options.TpotMs = None,
    target: options.Share = None,
    warm_up: options.WarmUp = 8,
    seed: options.Seed = None,
    vocabulary: options.Vocabulary = DEFAULT_VOCABULARY.end,
    price: options.PriceText = None,
    usd_per_hour: options.UsdPerHour = None,
    timeout_s: options.Timeout = 300.0,
    json_path: options.JsonFile = None,
    html_path: options.Html = None,
    markdown: options.Markdown = False,
) -> None:
    """Find the largest rate at which the promise (--ttft-ms, --tpot-ms) is kept, and how surely.

    The rate is doubled until the promise fails and the gap then narrowed. Every rate is run until
    an interval decides it, a few times at most. Exit code 1: no rate holds. Ctrl-C ends the search
    with what was found.
    """
    with mistakes():
        source = Source.parse(server)
        checked([source], key=key, model=model)
        check_writable(json_path, html_path)
        slo = slo_of(ttft_ms, tpot_ms, target)
        if plan is None and not slo.promises:
            raise ValueError("--ttft-ms or --tpot-ms: a promise is needed that can be kept or not")
        pace = Pace(arrivals, None, cv, seconds=seconds)
        if plan is None:
            usual = "poisson" if cv is None else "gamma"
            pace = Pace(arrivals or usual, start_rate, cv, seconds=seconds or _USUAL_SECONDS)
        what = wanted(
            *(workload, settings or [], plan, pace, slo),
            seed=seed,
            vocabulary=vocabulary,
            warm_up=warm_up,
        )
        first, warm = what.load_at(start_rate, what.seed), what.warm_up_sessions()
        promising(first.tenants)
        highest_rate = what.highest_rate()
        if start_rate > highest_rate:
            raise ValueError(
                f"--start-rate: there are not enough sessions for {start_rate:g}/s: take fewer "
                f"--seconds, or {_floor(highest_rate)} at most"
            )
        manner = manner_of(
            *(what, first.tenants, warm),
            timeout_s=timeout_s,
            price=price,
            usd_per_hour=usd_per_hour,
        )

    title = first.title
    del first  # a load may be large, and each run makes its own
    runs: list[Run] = []
    unit = "sessions/s" if plan is None else "× the plan"

    entry = entry_keys(key, manner.keys)

    async def work() -> tuple[FoundMax, bool, str | None]:
        async with opened([source], keys=entry, model=model, tell=say) as targets:
            at = replace(targets[0], vocabulary=what.vocabulary, timeout_s=timeout_s)
            with stopped_by_interrupt() as stopping:
                measure = _measure(at, what, replace(manner, stop=stopping), warm, runs, unit)
                found = await search(
                    measure,
                    start_rate=start_rate,
                    precision=precision,
                    most_runs=most_runs,
                    highest_rate=highest_rate,
                    unit=unit,
                    tell=say,
                )
                return found, stopping.is_set(), at.endpoint.key

    found, interrupted, own_key = finished(work())
    if not runs and interrupted:
        stop("interrupted before any run had ended", INTERRUPTED)
    table = found.table()
    typer.echo(table.markdown() if markdown else table.text())
    typer.echo("")
    for line in found.lines():
        typer.echo(line)
    if found.fails is None and math.isfinite(highest_rate):
        typer.echo(
            f"for more than {_floor(highest_rate)}/s there are not enough sessions: nothing is "
            "known of it"
        )
    keep(
        runs,
        title=f"{runs[0].name}: the largest rate, {title}",
        json_path=json_path,
        html_path=html_path,
        keys=[*manner.keys.values(), *([own_key] if own_key else [])],
        found=found,
    )
    if interrupted:
        stop(f"interrupted after {len(runs)} runs", INTERRUPTED)
    if found.rate is None:
        raise typer.Exit(FAILED)


def _measure(
    at: Target,
    what: Wanted,
    manner: Manner,
    warm: Sequence[Session],
    runs: list[Run],
    unit: str,
) -> Measure:
    """Runs the load at a rate, behind the warm-up if it is the first. Raises StoppedError once the
    manner says so: half a run is none."""

    async def measure(rate: float, repetition: int) -> Run:
        # No two runs share a prompt, whichever rates they have.
        number = what.seed * _SEEDS_OF_A_SEARCH + len(runs)
        with progress_bar(f"{at.name} at {rate:.3g} {unit}") as on_progress:
            run = await measured(
                at,
                what.load_at(rate, number),
                replace(manner, on_progress=on_progress),
                warm_up=() if runs else warm,
                settings={"rate": f"{rate:g} {unit}", "repetition": str(repetition)},
            )
        if manner.stop is not None and manner.stop.is_set():
            raise StoppedError
        runs.append(run)
        return run

    return measure


def _floor(rate: float) -> str:
    """Not more than the rate, so that it can be asked for."""
    return f"{math.floor(rate * 1000) / 1000:g}"
