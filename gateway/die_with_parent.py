"""Run a program that is told to end (SIGTERM) when whoever started it does. Linux only.

Started as a script, before anything of ours is imported: `python die_with_parent.py PARENT_PID
PROGRAM ARGUMENT...`. The wish survives the exec, and so does the session the process was started
in. `PARENT_PID` closes a gap: a parent that died before the wish was made can send no signal.

The kernel sends the signal when the starting *thread* ends, so that one must live as long as the
program is to.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    parent_pid, program = int(sys.argv[1]), sys.argv[2]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit("the parent has ended")
    os.execv(program, sys.argv[2:])


if __name__ == "__main__":
    main()
