"""What a server says on standard output, which it does not need in order to serve."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def announce(text: str) -> bool:
    """Write text to standard output; False if that is full, or read by nobody any more."""
    try:
        print(text, end="", flush=True)  # noqa: T201 - the command's output
    except (OSError, ValueError):
        give_up_output()
        return False
    return True


def give_up_output() -> None:
    """Write to standard output no more: neither what is left of what could not be written, which
    the interpreter would try again on its way out and then fail, nor anything else."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, sys.stdout.fileno())
        finally:
            os.close(null)
