"""`loadtest bench` and `soak`: forebay itself, started for it.

Exit codes: 0 every request was answered whole, 1 some were not or a server could not be measured,
2 wrong use.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from loadtest.bench.batching import BATCHING, BatchingFigures
from loadtest.bench.batching_report import batching_note, batching_tables
from loadtest.bench.cache import CacheFigures
from loadtest.bench.cache_report import cache_notes, cache_tables
from loadtest.bench.campaign import Contender, Report
from loadtest.bench.divergence import Divergence
from loadtest.bench.gateway_cost import GatewayCost
from loadtest.bench.plan import PARTS, BenchPlan, routing_parts, run_bench, tenants_parts
from loadtest.bench.report import (
    as_json,
    divergence_notes,
    figures,
    gateway_note,
    gateway_table,
    notes,
)
from loadtest.bench.routing import ROUTING_PARTS, RoutingFigures
from loadtest.bench.routing_report import routing_notes, routing_tables
from loadtest.bench.soak import complaints, run_soak
from loadtest.bench.tenants import RUN_S, TENANTS_PARTS, TenantsFigures
from loadtest.bench.tenants_report import tenants_notes, tenants_tables
from loadtest.bench.workloads import STANDARD, Workload
from loadtest.cli.errors import finished, say, stop
from loadtest.forebay_server import MODEL
from loadtest.machine import describe_machine
from loadtest.target import Target
from loadtest.vocabulary import Vocabulary
from loadtest.wire.connection import Endpoint

_Repeats = Annotated[int, typer.Option(min=1, help="Repetitions of each workload.")]
_Seed = Annotated[
    int | None,
    typer.Option(min=0, help="Of the prompts. A server's cache knows those of an earlier run."),
]
_Json = Annotated[Path | None, typer.Option("--json", help="Write every figure to this file.")]
_Markdown = Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")]
_Against = Annotated[str | None, typer.Option(help="A second server's URL, measured in turn.")]
_AgainstModel = Annotated[str | None, typer.Option(help="Its model; the same name if left out.")]
_AgainstName = Annotated[str, typer.Option(help="What the tables call it.")]
_AgainstKey = Annotated[str | None, typer.Option(envvar="LOADTEST_AGAINST_KEY", help="Its key.")]
_AgainstPid = Annotated[int | None, typer.Option(help="Its process here, to read its memory.")]


def bench(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PART]...",
            help="engine, gateway, divergence, cache, routing, tenants, batching, or parts of "
            "them: workloads of the engine, routing-decision, routing-proxy, routing-policies, "
            "routing-workers, tenants-overhead, tenants-neighbour, tenants-goodput.",
        ),
    ] = None,
    repeats: _Repeats = 3,
    run_s: Annotated[
        float,
        typer.Option(min=2, help="Seconds for which requests come in each run of tenants."),
    ] = RUN_S,
    seed: _Seed = None,
    json_path: _Json = None,
    markdown: _Markdown = False,
    against: _Against = None,
    against_model: _AgainstModel = None,
    against_name: _AgainstName = "peer",
    against_key: _AgainstKey = None,
    against_pid: _AgainstPid = None,
) -> None:
    """Start forebay with the bundled model, measure the parts named (all if none), stop it."""
    plan = _planned(parts or PARTS, run_s)
    peer = None
    if against is not None:
        target = Target(against_name, _endpoint(against, against_key), against_model or MODEL)
        peer = Contender(target, against_pid)
    found = finished(run_bench(plan, peer=peer, repeats=repeats, seed=_seeded(seed), tell=say))
    if found.start_s is not None:
        typer.echo(f"forebay was ready after {found.start_s:.1f} s")
    _show(
        found.reports,
        plan.workloads,
        gateway=found.gateway,
        divergence=found.divergence,
        cache=found.cache,
        routing=found.routing,
        tenants=found.tenants,
        batching=found.batching,
        markdown=markdown,
        json_path=json_path,
    )


def soak(
    model: Annotated[
        Path,
        typer.Option(
            exists=True, resolve_path=True, help="A tiny checkpoint: a directory or a .gguf file."
        ),
    ],
    prompts: Annotated[int, typer.Option(min=20, help="How many prompts.")] = 100_000,
    first_token: Annotated[int, typer.Option(min=0, help="Prompts use token ids from here")] = 3,
    end_token: Annotated[int, typer.Option(min=16, help="to below this.")] = 256,
    seed: _Seed = None,
) -> None:
    """Start forebay with a tiny model and small tiers, send it unique prompts, cut off 30 %, and
    see whether anything is left behind or piles up."""
    vocabulary = Vocabulary(first_token, end_token)
    report = finished(
        run_soak(model, prompts=prompts, seed=_seeded(seed), vocabulary=vocabulary, tell=say)
    )
    lines = complaints(report)
    for line in lines:
        typer.echo(f"FAILED: {line}")
    if lines:
        raise typer.Exit(1)
    ends = ", ".join(f"{count:,} {end}" for end, count in sorted(report.ends.items()))
    typer.echo(f"passed: {ends}")


def _show(
    reports: Sequence[Report],
    workloads: Sequence[Workload],
    *,
    gateway: GatewayCost | None = None,
    divergence: Divergence | None = None,
    cache: CacheFigures | None = None,
    routing: RoutingFigures | None = None,
    tenants: TenantsFigures | None = None,
    batching: BatchingFigures | None = None,
    markdown: bool,
    json_path: Path | None,
) -> None:
    """Print what was found, write it where it was asked for, and exit with 1 on failed requests."""
    machine = describe_machine()
    tables = [figures(reports, workloads)] if reports else []
    tables += [gateway_table(gateway)] if gateway is not None else []
    tables += cache_tables(cache) if cache is not None else []
    tables += routing_tables(routing) if routing is not None else []
    tables += tenants_tables(tenants) if tenants is not None else []
    tables += batching_tables(batching) if batching is not None else []
    typer.echo("\n".join(machine))
    for table in tables:
        typer.echo(f"\n{table.markdown() if markdown else table.text()}")
    lines = [gateway_note(gateway)] if gateway is not None else []
    lines += divergence_notes(divergence) if divergence is not None else []
    lines += cache_notes(cache) if cache is not None else []
    lines += routing_notes(routing) if routing is not None else []
    lines += tenants_notes(tenants) if tenants is not None else []
    lines += [batching_note(batching)] if batching is not None else []
    typer.echo("")
    for line in [*lines, *notes(reports)]:
        typer.echo(line)
    if json_path is not None:
        try:
            json_path.write_bytes(
                as_json(
                    reports,
                    workloads,
                    machine,
                    gateway,
                    divergence,
                    cache,
                    routing,
                    tenants,
                    batching,
                )
            )
        except OSError as error:
            stop(f"{json_path}: cannot be written ({error.strerror})")
    failures = [line for report in reports for line in report.failures]
    failures += cache.failures if cache is not None else []
    failures += routing.failures if routing is not None else []
    if failures:
        raise typer.Exit(1)


def _planned(names: Sequence[str], run_s: float) -> BenchPlan:
    """All workloads for "engine", else those that are named."""
    known = (*PARTS, *ROUTING_PARTS, *TENANTS_PARTS, *STANDARD)
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name}: no such part; there are {', '.join(known)}")
    chosen = STANDARD if "engine" in names else [name for name in STANDARD if name in names]
    return BenchPlan(
        tuple(STANDARD[name] for name in chosen),
        gateway="gateway" in names,
        divergence="divergence" in names,
        cache="cache" in names,
        routing=routing_parts(names),
        tenants=tenants_parts(names),
        run_s=run_s,
        batching=BATCHING in names,
    )


def _endpoint(url: str, key: str | None) -> Endpoint:
    try:
        return Endpoint.parse(url, key)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _seeded(seed: int | None) -> int:
    """A seed that no earlier run had, if none is given: else a warm cache would pass for a cold
    one."""
    if seed is None:
        seed = secrets.randbelow(1 << 32)
        say(f"seed {seed}")
    return seed
