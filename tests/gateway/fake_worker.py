"""A worker that does nothing but keep a diary of what it was told.

Run as `python fake_worker.py DIARY [BEHAVIOUR]`:
`exit N` ends with that code before it is ready, `die` by SIGKILL; `wait FILE` is ready only once
that file is there; `stay` needs two SIGTERMs; `deaf` ends at none.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

TOLD = (signal.SIGTERM, signal.SIGHUP)


def main(diary: Path, behaviour: str = "", argument: str = "") -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, TOLD)
    write(diary, f"started {os.getpid()}")
    if behaviour == "exit":
        return int(argument)
    if behaviour == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while behaviour == "wait" and not Path(argument).exists():
        time.sleep(0.005)
    sys.stdout.write("forebay serves\ncurl\n")
    sys.stdout.flush()
    stops = 0
    while True:
        number = signal.sigwait(TOLD)
        write(diary, signal.Signals(number).name)
        if number == signal.SIGTERM and behaviour != "deaf":
            stops += 1
            if behaviour != "stay":
                return 0
            if stops == 2:
                return 143


def write(diary: Path, line: str) -> None:
    with diary.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
