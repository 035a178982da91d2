"""How many files and connections this process may have open."""

from __future__ import annotations

import resource
from contextlib import suppress

ENOUGH = 65_536
"""A stream takes two: the client's connection and a server's."""
_FEW = 4_096


def raise_limit() -> int | None:
    """Have this process, and what it starts, open as many as the system lets it, `ENOUGH` at most:
    shells and supervisors begin with 1,024, for programs that know no more. Returns the limit
    where it is low all the same, else None."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft < wanted:
        with suppress(OSError, ValueError):  # some systems have a bound of their own below it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return soft if soft < _FEW else None
