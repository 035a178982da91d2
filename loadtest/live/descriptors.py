"""File descriptors: every open request needs one."""

from __future__ import annotations

import resource
from contextlib import suppress


def raise_descriptor_limit() -> None:
    """Let this process have as many files and connections open as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # A system may have a limit of its own below the hard one and refuse; then the old one
        # stays, and a request that finds none left says so.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
