"""`forebay serve` whose engines die at their next step once the file named by MORTAL_FILE is there.

Run as `python -m tests.e2e.mortal_gateway serve --config FILE`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from engine.scheduler import Chunk, Scheduler
from gateway.cli import main

FATAL = Path(os.environ["MORTAL_FILE"])
_schedule = Scheduler.schedule


def schedule(self: Scheduler) -> list[Chunk]:
    if FATAL.exists():
        raise RuntimeError("the books do not add up")
    return _schedule(self)


if __name__ == "__main__":
    Scheduler.schedule = schedule  # type: ignore[method-assign] # this is what the module is for
    sys.exit(main())
