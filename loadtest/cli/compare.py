"""`loadtest compare`: several servers or settings under the same load, in turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from loadtest.cli import options
from loadtest.cli.errors import FAILED, INTERRUPTED, finished, mistakes, say, stop
from loadtest.cli.results import check_writable, end_if_failed, keep
from loadtest.cli.wanted import Pace, Wanted, entry_keys, manner_of, slo_of, wanted
from loadtest.compare import Contender, check_terms, how_long
from loadtest.compare import compare as run_in_turn
from loadtest.comparison import DEFAULT_HEADLINE, Comparison
from loadtest.contenders import Source, checked, opened
from loadtest.live.interrupt import stopped_by_interrupt
from loadtest.measuring import Manner, measured
from loadtest.plan import Session
from loadtest.record import Run
from loadtest.stopping import StoppedError
from loadtest.target import Target
from loadtest.vocabulary import DEFAULT_VOCABULARY
from loadtest.workloads.plan_file import Plan
from loadtest.workloads.randomness import derived_seed


def compare(
    servers: Annotated[
        list[str],
        typer.Argument(
            metavar="SERVER SERVER...",
            help="[NAME=]URL, [NAME=]FILE.yaml, forebay, [NAME=]peer:NAME. The first one is what "
            "the others are held against.",
        ),
    ],
    workload: options.WorkloadName = None,
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
    """Run the same load against several servers or settings, in turn, and say what differs.

    Every round runs each of them once with the same prompts and times, but for one that is named
    twice. Ratios are taken within rounds, so that what slows the machine for a while slows both
    sides. Exit code 1: one of them could not be run, or some request was not answered whole and as
    asked. Ctrl-C ends the comparison with the runs that had ended.
    """
    with mistakes():
        sources = [Source.parse(server) for server in servers]
        if len(sources) < 2:
            raise ValueError("a comparison needs two servers or more")
        checked(sources, key=key, model=model)
        check_terms([source.name for source in sources], rounds=rounds, headline=headline)
        check_writable(json_path, html_path)
        what = wanted(
            *(workload, settings or [], plan),
            Pace(arrivals, rate, cv, concurrency, requests, seconds),
            slo_of(ttft_ms, tpot_ms, target),
            seed=seed,
            vocabulary=vocabulary,
            warm_up=warm_up,
        )
        first, warm = what.load(), what.warm_up_sessions()
        manner = manner_of(
            *(what, first.tenants, warm),
            timeout_s=timeout_s,
            price=price,
            usd_per_hour=usd_per_hour,
        )

    title, entry = first.title, entry_keys(key, manner.keys)
    say(how_long(first, rounds=rounds, servers=len(sources)))
    del first  # a load may be large, and each round makes its own
    runs: list[Run] = []

    async def work() -> tuple[Comparison, bool, list[str]]:
        async with opened(sources, keys=entry, model=model, tell=say) as targets:
            fitted = [
                replace(at, vocabulary=what.vocabulary, timeout_s=timeout_s) for at in targets
            ]
            met = [_met_before(at, fitted[:place]) for place, at in enumerate(fitted)]
            for at, times in zip(fitted, met, strict=True):
                if times and (isinstance(what.source, Plan) or what.source.ever_new):
                    say(f"{at.name}: has prompts of its own, as another is the same server")
                elif times:
                    say(f"{at.name}: finds cached what another was sent, as it is the same server")
            with stopped_by_interrupt() as stopping:
                how = replace(manner, stop=stopping)
                contenders = [
                    Contender(at.name, _measure(at, what, how, warm, runs, times))
                    for at, times in zip(fitted, met, strict=True)
                ]
                comparison = await run_in_turn(
                    contenders, rounds=rounds, seed=what.seed, headline=headline, tell=say
                )
                own_keys = [at.endpoint.key for at in fitted if at.endpoint.key]
                return comparison, stopping.is_set(), own_keys

    comparison, interrupted, own_keys = finished(work())
    if not runs and interrupted:
        stop("interrupted before any run had ended", INTERRUPTED)
    table = comparison.table()
    typer.echo(f"{title}\n")
    typer.echo(table.markdown() if markdown else table.text())
    typer.echo("")
    for line in comparison.lines():
        typer.echo(line)
    if not runs:
        stop("nothing could be measured: there is nothing to keep")
    keep(
        runs,
        title=f"{' against '.join(source.name for source in sources)}: {title}",
        json_path=json_path,
        html_path=html_path,
        keys=[*manner.keys.values(), *own_keys],
        comparison=comparison,
    )
    planned = rounds * len(sources)
    if interrupted:
        stop(f"interrupted after {len(runs)} of {planned} runs", INTERRUPTED)
    if len(runs) < planned:
        raise typer.Exit(FAILED)
    end_if_failed(runs)


def _met_before(at: Target, others: Sequence[Target]) -> int:
    """How many of the others are the same server: what they were sent lies in its cache."""
    here = (at.endpoint.host, at.endpoint.port)
    return sum((other.endpoint.host, other.endpoint.port) == here for other in others)


def _measure(
    at: Target,
    what: Wanted,
    manner: Manner,
    warm: Sequence[Session],
    runs: list[Run],
    met_before: int,
) -> Callable[[int], Awaitable[Run]]:
    """Runs the load once more against a server, which is warmed up before the first time; one that
    is among the contenders more than once does not get equal prompts twice. Raises StoppedError
    once the manner says so: half a run is none."""
    left = list(warm)

    async def measure(seed: int) -> Run:
        if met_before:
            seed = derived_seed(seed, f"same server {met_before}")
        run = await measured(at, what.load(seed), manner, warm_up=left)
        if manner.stop is not None and manner.stop.is_set():
            raise StoppedError
        left.clear()
        runs.append(run)
        return run

    return measure
