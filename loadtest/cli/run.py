"""`loadtest run`: one load against one server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from loadtest.cli import options
from loadtest.cli.errors import INTERRUPTED, finished, mistakes, say, stop
from loadtest.cli.results import check_writable, end_if_failed, keep, progress_bar, show_run
from loadtest.cli.wanted import Pace, entry_keys, manner_of, slo_of, wanted
from loadtest.contenders import Source, checked, opened
from loadtest.live.interrupt import stopped_by_interrupt
from loadtest.measuring import Manner, measured
from loadtest.plan import Load, Session
from loadtest.record import Run
from loadtest.target import Target
from loadtest.vocabulary import DEFAULT_VOCABULARY


def run(
    server: Annotated[
        str,
        typer.Argument(
            help="A URL; or forebay, a .yaml file for it, or peer:NAME, to be started here."
        ),
    ] = options.DEFAULT_SERVER,
    workload: options.WorkloadName = None,
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
    target: options.Share = None,
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
    unanswered. Exit code 1: some request was not answered whole and as asked. Ctrl-C ends the load,
    and what had ended by then is shown and kept.
    """
    with mistakes():
        source = Source.parse(server)
        checked([source], key=key, model=model)
        check_writable(json_path, html_path)
        what = wanted(
            *(workload, settings or [], plan),
            Pace(arrivals, rate, cv, concurrency, requests, seconds),
            slo_of(ttft_ms, tpot_ms, target),
            seed=seed,
            vocabulary=vocabulary,
            warm_up=warm_up,
        )
        load, warm = what.load(), what.warm_up_sessions()
        manner = manner_of(
            *(what, load.tenants, warm),
            timeout_s=timeout_s,
            price=price,
            usd_per_hour=usd_per_hour,
        )
        manner = replace(manner, check_repeats=check_repeats)

    entry = entry_keys(key, manner.keys)

    async def work() -> tuple[Run, bool, str | None]:
        async with opened([source], keys=entry, model=model, tell=say) as targets:
            at = replace(targets[0], vocabulary=what.vocabulary, timeout_s=timeout_s)
            return *await _run_once(at, load, warm, manner), at.endpoint.key

    found, interrupted, own_key = finished(work())
    show_run(found, markdown=markdown)
    keys = [*manner.keys.values(), *([own_key] if own_key else [])]
    keep(
        [found],
        title=f"{found.name}: {found.workload}",
        json_path=json_path,
        html_path=html_path,
        keys=keys,
    )
    if interrupted:
        stop("interrupted", INTERRUPTED)
    end_if_failed([found])


async def _run_once(
    at: Target, load: Load, warm: Sequence[Session], manner: Manner
) -> tuple[Run, bool]:
    """The run, and whether it was interrupted."""
    with stopped_by_interrupt() as stopping, progress_bar(at.name) as on_progress:
        how = replace(manner, stop=stopping, on_progress=on_progress)
        return await measured(at, load, how, warm_up=warm), stopping.is_set()
