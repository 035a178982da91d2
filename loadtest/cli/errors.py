"""What ends a command: one line for each mistake, and an exit code.

0: what was asked for was done. 1: requests failed, or a server could not be measured. 2: wrong use.
130: interrupted, by Ctrl-C, which keeps what was measured by then, or by SIGTERM, which does not.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import typer
import uvloop

from loadtest.bench.campaign import CampaignError
from loadtest.wire.connection import ExchangeError

_T = TypeVar("_T")

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def say(line: str) -> None:
    """To whoever watches, apart from what is printed as a result."""
    typer.echo(line, err=True)


def stop(message: str, code: int = FAILED) -> NoReturn:
    """End the command with a message, line by line."""
    for line in message.splitlines():
        say(f"loadtest: {line}")
    raise typer.Exit(code)


@contextmanager
def mistakes() -> Iterator[None]:
    """What is wrong with a command's arguments or files ends it as wrong use."""
    try:
        yield
    except ValueError as error:
        stop(str(error), MISUSED)
    except OSError as error:
        # One that has a file says no word of it by itself.
        named = error.filename is not None and error.strerror is not None
        stop(f"{error.filename}: {error.strerror}" if named else str(error), MISUSED)


def finished(work: Coroutine[Any, Any, _T]) -> _T:
    """What the work brings. A server that cannot be measured ends the command, and so does SIGTERM,
    like Ctrl-C: the servers that were started end with it."""
    try:
        with _terminated_as_interrupted():
            return uvloop.run(work)
    except (CampaignError, ExchangeError) as error:
        stop(str(error))
    except KeyboardInterrupt:
        stop("interrupted", INTERRUPTED)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Only the main thread is told of signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
