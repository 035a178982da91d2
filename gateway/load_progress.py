"""Shows how far loading has come: a bar on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

ReportProgress = Callable[[str, int, int], None]
"""Called as (what, bytes done, bytes in all), from any thread."""


def no_progress(_what: str, _done: int, _total: int) -> None:
    """For loading that nobody watches."""


_LINE_EVERY_S = 10.0
"""What loads faster gets no line of its own: the one that says it is loaded comes soon enough."""

_log = structlog.get_logger("forebay.loading")


@contextmanager
def show_progress() -> Iterator[ReportProgress]:
    """Yields the function to report to.

    On a terminal the bar is the last line of standard error, and what else is written there while
    the scope is open goes above it. A bar that is full disappears.
    """
    if not sys.stderr.isatty():
        yield LoggedProgress()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
    )
    # Standard output is left alone: the only thing printed there comes after the last bar.
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if done < total:
                if what not in tasks:
                    tasks[what] = progress.add_task(what, total=total)
                progress.update(tasks[what], completed=done, total=total)
            elif what in tasks:
                progress.remove_task(tasks.pop(what))

        yield report


class LoggedProgress:
    """A log line every ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_line = clock()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = self._clock()
        if done < total and now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            _log.info("loading", what=what, percent=100 * done // total)
