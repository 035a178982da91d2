"""`loadtest report`: a page of runs that were kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadtest.cli.errors import mistakes
from loadtest.cli.results import check_writable
from loadtest.report.page import write_report
from loadtest.run_file import read_run


def report(
    files: Annotated[list[Path], typer.Argument(help="Files that --json has written.")],
    html_path: Annotated[Path, typer.Option("--html", help="The page to write.")],
    title: Annotated[str | None, typer.Option(help="What stands above it.")] = None,
) -> None:
    """Make one page of the runs in these files: figures, pictures, and what they mean."""
    with mistakes():
        check_writable(html_path)
        runs = [read_run(path) for path in files]
        heading = title or "; ".join(dict.fromkeys(f"{run.name}: {run.workload}" for run in runs))
        write_report(html_path, runs, title=heading)
    typer.echo(f"wrote {html_path}")
