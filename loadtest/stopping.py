"""Several runs that are cut short keep what they have found by then."""

from __future__ import annotations


class StoppedError(Exception):
    """Raised instead of making another run by what makes them, when it is not to go on."""
