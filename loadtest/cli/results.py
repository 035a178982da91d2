"""Where results go: the terminal, a file of all records, the page."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from loadtest.cli.errors import FAILED, mistakes, stop
from loadtest.columns import Columns
from loadtest.comparison import Comparison
from loadtest.console import lines_of, markdown_of
from loadtest.find_max import FoundMax
from loadtest.hidden_keys import HIDDEN_KEY, without_keys
from loadtest.live.progress import OnProgress
from loadtest.live.progress import Progress as Counts
from loadtest.record import Run
from loadtest.report.page import write_report
from loadtest.run_file import write_run
from loadtest.summary import summarize


def show_run(run: Run, *, markdown: bool) -> None:
    """Print a run's figures."""
    summary = summarize(run)
    if markdown:
        typer.echo(markdown_of(run, summary), nl=False)
    else:
        typer.echo("\n".join(lines_of(run, summary)))


def check_writable(*paths: Path | None) -> None:
    """Raises ValueError for a file that could not be written: better now than after an hour."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir() or not path.parent.is_dir():
            why = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}"
            raise ValueError(f"{path}: cannot be written ({why})")
        if not os.access(path.parent, os.W_OK):
            raise ValueError(f"{path}: cannot be written (no permission)")


def keep(
    runs: Sequence[Run],
    *,
    title: str,
    json_path: Path | None,
    html_path: Path | None,
    keys: Sequence[str],
    found: FoundMax | None = None,
    comparison: Comparison | None = None,
) -> None:
    """Write what was asked for. Several runs get files of their own beside each other: `run.json`
    becomes `run-1.json`, and so on."""
    for key in sorted(keys, key=len, reverse=True):
        title = title.replace(key, HIDDEN_KEY)
    runs = [without_keys(run, keys) for run in runs]
    with mistakes():
        if json_path is not None:
            for run, path in zip(runs, _paths(json_path, len(runs)), strict=True):
                write_run(path, run, keys=keys)
        if html_path is not None:
            write_report(html_path, runs, title=title, found=found, comparison=comparison)


def end_if_failed(runs: Sequence[Run]) -> None:
    """Exit with 1 if any request was not answered whole and as asked."""
    if any(not run.records for run in runs):
        stop("nothing was sent")
    if any(not Columns.of(run.records).ok.all() for run in runs):
        raise typer.Exit(FAILED)


@contextmanager
def progress_bar(title: str) -> Iterator[OnProgress | None]:
    """A bar on the terminal while a load runs; nothing where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TextColumn("{task.fields[said]}"), TimeElapsedColumn(), TimeRemainingColumn()),
    )
    # It draws when it is told to: a thread that draws by itself would take the client's core.
    bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
    with bar:
        task = bar.add_task(title, total=None, said="")

        def show(counts: Counts) -> None:
            said = f"{counts.open} open, {counts.failed} failed"
            bar.update(task, total=counts.planned, completed=counts.ended, said=said)
            bar.refresh()

        yield show


def _paths(path: Path, count: int) -> list[Path]:
    if count == 1:
        return [path]
    suffixes = "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:])
    stem = path.name.removesuffix(suffixes)
    return [path.with_name(f"{stem}-{number}{suffixes}") for number in range(1, count + 1)]
