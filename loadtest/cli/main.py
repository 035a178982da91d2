"""The command: `forebay loadtest`, also `python -m loadtest`."""

from __future__ import annotations

import typer

from loadtest.cli.bench import bench, soak
from loadtest.cli.compare import compare
from loadtest.cli.find_max import find_max
from loadtest.cli.report import report
from loadtest.cli.run import run
from loadtest.cli.simulate import simulate
from loadtest.cli.workloads import trace, workloads

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Load tests for forebay and any OpenAI-compatible server.",
)
app.command("run")(run)
app.command("find-max")(find_max)
app.command("compare")(compare)
app.command("simulate")(simulate)
app.command("report")(report)
app.command("workloads")(workloads)
app.command("trace")(trace)
app.command("bench")(bench)
app.command("soak")(soak)


def main() -> None:
    """The command by itself."""
    app(prog_name="python -m loadtest")
