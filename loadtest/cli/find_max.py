"""`loadtest find-max`: the largest rate at which promises hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from loadtest.cli import options
from loadtest.cli.errors import FAILED, finished, mistakes, say
from loadtest.cli.results import keep
from loadtest.cli.wanted import Pace, keys_of, run_settings, slo_of, this_command, wanted
from loadtest.contenders import Source, opened
from loadtest.find_max import FoundMax
from loadtest.find_max import find_max as search
from loadtest.measuring import Manner, measured
from loadtest.record import Run
from loadtest.stats.cost import parse_price
from loadtest.vocabulary import DEFAULT_VOCABULARY

_SEEDS_OF_A_RATE = 1000


def find_max(
    server: Annotated[
        str,
        typer.Argument(
            help="A URL; or forebay, a .yaml file for it, or peer:NAME, to be started here."
        ),
    ] = options.DEFAULT_SERVER,
    workload: options.WorkloadName = "shared-prompts",
    settings: options.Settings = None,
    plan: options.PlanFile = None,
    start_rate: Annotated[
        float,
        typer.Option(
            min=1e-3, help="Where to begin: sessions per second; of a plan, how many times as fast."
        ),
    ] = 1.0,
    seconds: Annotated[
        float, typer.Option(min=1, help="How long requests come in each run.")
    ] = 30.0,
    arrivals: Annotated[str, typer.Option(help="poisson, constant or gamma.")] = "poisson",
    cv: options.Cv = None,
    precision: Annotated[
        float, typer.Option(min=0.005, max=0.5, help="How narrow the gap may be, of the rate.")
    ] = 0.05,
    most_runs: Annotated[int, typer.Option("--max-runs", min=2, help="No more runs than.")] = 30,
    model: options.Model = None,
    key: options.Key = None,
    ttft_ms: options.TtftMs = None,
    tpot_ms: options.TpotMs = None,
    target: options.Share = 0.95,
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
    an interval decides it, a few times at most. Exit code 1: no rate holds.
    """
    with mistakes():
        source = Source.parse(server)
        slo = slo_of(ttft_ms, tpot_ms, target)
        if plan is None and not slo.promises:
            raise ValueError("--ttft-ms or --tpot-ms: a promise is needed that can be kept or not")
        pace = Pace() if plan is not None else Pace(arrivals, start_rate, cv, seconds=seconds)
        what = wanted(
            *(workload, settings or [], plan, pace, slo),
            seed=seed,
            vocabulary=vocabulary,
            warm_up=warm_up,
        )
        first = what.load_at(start_rate, what.seed)
        manner = Manner(
            command=this_command(what.seed),
            keys=keys_of(first.tenants),
            settings=run_settings(warm_up, timeout_s),
            price=None if price is None else parse_price(price),
            usd_per_hour=usd_per_hour,
        )
        warm = what.warm_up_sessions()

    async def work() -> tuple[FoundMax, list[Run], str | None]:
        runs: list[Run] = []
        async with opened([source], key=key, model=model, tell=say) as targets:
            at = replace(targets[0], vocabulary=what.vocabulary, timeout_s=timeout_s)

            async def measure(rate: float, repetition: int) -> Run:
                # no two runs share a prompt, and rates have other seeds than their repetitions
                number = what.seed * _SEEDS_OF_A_RATE + len(runs)
                run = await measured(
                    at,
                    what.load_at(rate, number),
                    manner,
                    warm_up=() if runs else warm,
                    settings={"rate": f"{rate:g}/s", "repetition": str(repetition)},
                )
                runs.append(run)
                return run

            found = await search(
                measure,
                start_rate=start_rate,
                precision=precision,
                most_runs=most_runs,
                unit="sessions/s" if plan is None else "× the plan",
                tell=say,
            )
            return found, runs, at.endpoint.key

    found, runs, own_key = finished(work())
    table = found.table()
    typer.echo(table.markdown() if markdown else table.text())
    typer.echo("")
    for line in found.lines():
        typer.echo(line)
    keep(
        runs,
        title=f"{runs[0].name}: the largest rate, {first.title}",
        json_path=json_path,
        html_path=html_path,
        keys=[*manner.keys.values(), *([own_key] if own_key else [])],
        found=found,
    )
    if found.rate is None:
        raise typer.Exit(FAILED)
