"""What ends a command: one line for each mistake, and an exit code.

0: what was asked for was done. 1: requests failed, or a server could not be measured. 2: wrong use.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import typer
import uvloop

from loadtest.bench.campaign import CampaignError
from loadtest.wire.connection import ExchangeError

_T = TypeVar("_T")

FAILED, MISUSED = 1, 2


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
        stop(f"{error.filename}: {error.strerror}", MISUSED)


def finished(work: Coroutine[Any, Any, _T]) -> _T:
    """What the work brings. A server that cannot be measured ends the command."""
    try:
        return uvloop.run(work)
    except (CampaignError, ExchangeError) as error:
        stop(str(error))
    except KeyboardInterrupt:
        stop("interrupted", 130)
