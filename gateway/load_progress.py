"""Shows how far loading has come: a bar on a terminal, a line per quarter elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

ReportProgress = Callable[[str, int, int], None]
"""Called as (what, bytes done, bytes in all), from any thread."""


@contextmanager
def show_progress(stream: TextIO | None = None) -> Iterator[ReportProgress]:
    """Yields the function to report to; what it shows goes to `stream` (None: standard error)."""
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield _PlainLines(stream)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        yield report


class _PlainLines:
    """One line at the start, at each quarter, and none twice."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: dict[str, int] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        quarter = 4 * done // total if total > 0 else 4
        if quarter > self._shown.get(what, -1):
            self._shown[what] = quarter
            self._stream.write(f"{what}: {25 * quarter} %\n")
            self._stream.flush()
