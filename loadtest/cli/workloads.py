"""`loadtest workloads` and `loadtest trace`: what can be sent, and what a recording holds."""

from __future__ import annotations

from typing import Annotated

import typer

from loadtest.cli.errors import MISUSED, mistakes, stop
from loadtest.tables import Table, number
from loadtest.traces.description import describe
from loadtest.traces.reading import FORMATS, read_trace
from loadtest.workloads.registry import WORKLOADS, parameters_of


def workloads(
    name: Annotated[str | None, typer.Argument(help="One of them, with its parameters.")] = None,
) -> None:
    """Show the workloads there are, or the parameters of one."""
    if name is None:
        rows = tuple((each, workload.help) for each, workload in WORKLOADS.items())
        width = max(len(each) for each, _ in rows)
        for each, what in rows:
            typer.echo(f"{each.ljust(width)}  {what}")
        return
    if name not in WORKLOADS:
        stop(f"no workload {name}; there are {', '.join(WORKLOADS)}", MISUSED)
    typer.echo(WORKLOADS[name].help)
    for parameter in parameters_of(name):
        unset = "unset" if parameter.default is None else f"default {parameter.default}"
        default = "needed" if parameter.required else unset
        typer.echo(f"  {parameter.name}  {parameter.description} ({default})")


def trace(
    path: Annotated[str, typer.Argument(help="A file, or mooncake for the piece that is shipped.")],
    trace_format: Annotated[
        str, typer.Option("--format", help=f"auto, {', '.join(FORMATS)}.")
    ] = "auto",
) -> None:
    """Say what a recording of traffic holds: lengths, rate, and how much of it is shared."""
    with mistakes():
        found = describe(read_trace(path, trace_format))
    rate = "" if found.rate_rps is None else f", {number(found.rate_rps)}/s"
    typer.echo(f"{found.requests:,} requests in {found.span_s:,.0f} s{rate}")
    rows = tuple(
        (name, number(each.mean), number(each.p50), number(each.p99), number(each.max))
        for name, each in (("prompt", found.prompt_tokens), ("answer", found.output_tokens))
    )
    typer.echo(Table(("tokens", "mean", "p50", "p99", "max"), rows).text())
    if found.ideal_hit_rate is not None:
        typer.echo(
            f"{found.unique_blocks:,} different blocks of {found.blocks:,}: one endless cache "
            f"would have {found.ideal_hit_rate:.1%} of them when they are asked for"
        )
