"""A process that ends with its scope, and everything that it started with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_TAIL_LINES = 15
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@contextmanager
def process_group(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str],
    output: IO[bytes] | None,
    stop_s: float,
    directory: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts `command` as the leader of a session of its own; ends the whole group with the scope.

    `environment` comes on top of this process's. What the command says goes to `output`, or where
    this process's own output goes. Ctrl-C in a terminal reaches only us, who then end it: SIGTERM
    to the group, and SIGKILL to whatever is left of it when its leader has ended or `stop_s` are
    over. Blocks until then, so that no cancellation can come in between. Raises OSError if there
    is no such program.
    """
    process = subprocess.Popen(
        list(command),
        env={**os.environ, **environment},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process, stop_s)


def tail(log: Path, lines: int = _TAIL_LINES) -> str:
    """The end of a log to put behind an error: each line on a line of its own, indented and without
    the codes that would colour it in a terminal."""
    try:
        said = _COLOUR.sub("", log.read_text(errors="replace")).splitlines()
    except FileNotFoundError:
        return ""
    return "".join(f"\n  {line}" for line in said[-lines:])


def _end(process: subprocess.Popen[bytes], stop_s: float) -> None:
    try:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(stop_s)
    finally:
        # Children may outlive their leader, whether it went by itself or not.
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To every process of the group. A leader's id names its group while a member is left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
