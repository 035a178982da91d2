"""`loadtest compare`: several servers or settings under the same load, in turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated

import typer

from loadtest.cli import options
from loadtest.cli.errors import FAILED, finished, mistakes, say
from loadtest.cli.results import keep
from loadtest.cli.wanted import Pace, Wanted, keys_of, run_settings, slo_of, this_command, wanted
from loadtest.compare import Contender
from loadtest.compare import compare as run_in_turn
from loadtest.comparison import DEFAULT_HEADLINE, Comparison
from loadtest.contenders import Source, opened
from loadtest.measuring import Manner, measured
from loadtest.record import Run
from loadtest.stats.cost import parse_price
from loadtest.target import Target
from loadtest.vocabulary import DEFAULT_VOCABULARY


def compare(
    servers: Annotated[
        list[str],
        typer.Argument(
            metavar="SERVER SERVER...",
            help="[NAME=]URL, [NAME=]FILE.yaml, forebay, [NAME=]peer:NAME. The first one is what "
            "the others are held against.",
        ),
    ],
    workload: options.WorkloadName = "shared-prompts",
    settings: options.Settings = None,
    plan: options.PlanFile = None,
    arrivals: options.Arrivals = None,
    rate: options.Rate = None,
    cv: options.Cv = None,
    concurrency: options.Concurrency = None,
    requests: options.Requests = None,
    seconds: options.Seconds = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each; 3 for any interval.")] = 5,
    headline: Annotated[
        str, typer.Option(help="The metric that it is about, chosen before it is seen.")
    ] = DEFAULT_HEADLINE,
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
    """Run the same load against several servers or settings, in turn, and say what differs.

    Every round runs each of them once with the same prompts and times. Ratios are taken within
    rounds, so that what slows the machine for a while slows both sides. Exit code 1: one of them
    could not be run.
    """
    with mistakes():
        sources = [Source.parse(server) for server in servers]
        if len(sources) < 2:
            raise ValueError("a comparison needs two servers or more")
        what = wanted(
            *(workload, settings or [], plan),
            Pace(arrivals, rate, cv, concurrency, requests, seconds),
            slo_of(ttft_ms, tpot_ms, target),
            seed=seed,
            vocabulary=vocabulary,
            warm_up=warm_up,
        )
        first = what.load()
        manner = Manner(
            command=this_command(what.seed),
            keys=keys_of(first.tenants),
            settings=run_settings(warm_up, timeout_s),
            price=None if price is None else parse_price(price),
            usd_per_hour=usd_per_hour,
        )

    async def work() -> tuple[Comparison, list[Run], list[str]]:
        runs: list[Run] = []
        async with opened(sources, key=key, model=model, tell=say) as targets:
            fitted = [
                replace(at, vocabulary=what.vocabulary, timeout_s=timeout_s) for at in targets
            ]
            contenders = [Contender(at.name, _measure(at, what, manner, runs)) for at in fitted]
            comparison = await run_in_turn(
                contenders, rounds=rounds, seed=what.seed, headline=headline, tell=say
            )
            return comparison, runs, [at.endpoint.key for at in fitted if at.endpoint.key]

    comparison, runs, own_keys = finished(work())
    table = comparison.table()
    typer.echo(f"{first.title}\n")
    typer.echo(table.markdown() if markdown else table.text())
    typer.echo("")
    for line in comparison.lines():
        typer.echo(line)
    keep(
        runs,
        title=f"{' against '.join(source.name for source in sources)}: {first.title}",
        json_path=json_path,
        html_path=html_path,
        keys=[*manner.keys.values(), *own_keys],
        comparison=comparison,
    )
    if len(runs) < rounds * len(sources):
        raise typer.Exit(FAILED)


def _measure(
    at: Target, what: Wanted, manner: Manner, runs: list[Run]
) -> Callable[[int], Awaitable[Run]]:
    """Runs the load once more against a server, which is warmed up before the first time."""
    warm = list(what.warm_up_sessions())

    async def measure(seed: int) -> Run:
        run = await measured(at, what.load(seed), manner, warm_up=warm)
        warm.clear()
        runs.append(run)
        return run

    return measure
