"""A process that runs the embedded Redis of a state directory, and whom tests do away with.

Run as `python -m tests.gateway.embedding STATE_DIR`: prints the URL, then leaves the scope when its
standard input ends. Ctrl-C is taken as a running gateway takes it: noticed, and answered later.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from gateway.embedded_redis import embedded_redis
from gateway.state_dir import StateDir


def main() -> None:
    signal.signal(signal.SIGINT, lambda *_: say("interrupted"))
    with embedded_redis(StateDir(Path(sys.argv[1])), 64 << 20, {}) as url:
        say(str(url))
        sys.stdin.read()


def say(line: str) -> None:
    """Unbuffered: a signal's handler may not enter a write of `sys.stdout` that it interrupts."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


if __name__ == "__main__":
    main()
