"""`loadtest run`: one load against one server."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from loadtest.cli import options
from loadtest.cli.errors import finished, mistakes, say
from loadtest.cli.results import end_if_failed, keep, progress_bar, show_run
from loadtest.cli.wanted import Pace, Wanted, keys_of, slo_of, this_command, wanted
from loadtest.contenders import Source, opened
from loadtest.live.interrupt import stopped_by_interrupt
from loadtest.measuring import Manner, measured
from loadtest.record import Run
from loadtest.stats.cost import parse_price
from loadtest.target import Target
from loadtest.vocabulary import DEFAULT_VOCABULARY


def run(
    server: Annotated[
        str,
        typer.Argument(
            help="A URL; or forebay, a .yaml file for it, or peer:NAME, to be started here."
        ),
    ] = options.DEFAULT_SERVER,
    workload: options.WorkloadName = "shared-prompts",
    settings: options.Settings = None,
    plan: options.PlanFile = None,
    arrivals: options.Arrivals = None,
    rate: options.Rate = None,
    cv: options.Cv = None,
    concurrency: options.Concurrency = None,
    requests: options.Requests = None,
    seconds: options.Seconds = None,
    model: options.Model = None,
    key: options.Key = None,
    ttft_ms: options.TtftMs = None,
    tpot_ms: options.TpotMs = None,
    target: options.Share = 0.95,
    warm_up: options.WarmUp = 8,
    seed: options.Seed = None,
    vocabulary: options.Vocabulary = DEFAULT_VOCABULARY.end,
    check_repeats: Annotated[
        bool, typer.Option("--check-repeats", help="Equal greedy prompts have to get equal texts.")
    ] = False,
    price: options.PriceText = None,
    usd_per_hour: options.UsdPerHour = None,
    timeout_s: options.Timeout = 300.0,
    json_path: options.JsonFile = None,
    html_path: options.Html = None,
    markdown: options.Markdown = False,
) -> None:
    """Send a load to a server, and say how it was answered.

    Requests are sent in a closed loop of --concurrency clients, or at a --rate whatever is
    unanswered. Exit code 1: some request was not answered whole and as asked.
    """
    with mistakes():
        source = Source.parse(server)
        what = wanted(
            *(workload, settings or [], plan),
            Pace(arrivals, rate, cv, concurrency, requests, seconds),
            slo_of(ttft_ms, tpot_ms, target),
            seed=seed,
            vocabulary=vocabulary,
            warm_up=warm_up,
        )
        load = what.load()
        manner = Manner(
            command=this_command(what.seed),
            keys=keys_of(load.tenants),
            settings={
                "warm-up requests": str(warm_up),
                "time limit of an answer": f"{timeout_s:g} s",
            },
            price=None if price is None else parse_price(price),
            usd_per_hour=usd_per_hour,
            check_repeats=check_repeats,
        )

    async def work() -> tuple[Run, Target]:
        async with opened([source], key=key, model=model, tell=say) as targets:
            at = replace(targets[0], vocabulary=what.vocabulary, timeout_s=timeout_s)
            return await _run_once(at, what, manner), at

    found, at = finished(work())
    show_run(found, markdown=markdown)
    keys = [*manner.keys.values(), *([at.endpoint.key] if at.endpoint.key else [])]
    keep(
        [found],
        title=f"{found.name}: {found.workload}",
        json_path=json_path,
        html_path=html_path,
        keys=keys,
    )
    end_if_failed([found])


async def _run_once(at: Target, what: Wanted, manner: Manner) -> Run:
    with stopped_by_interrupt() as stop, progress_bar(at.name) as on_progress:
        how = replace(manner, stop=stop, on_progress=on_progress)
        return await measured(at, what.load(), how, warm_up=what.warm_up_sessions())
