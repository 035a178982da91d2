"""Garbage collection, kept out of what is measured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """None within the scope: a full one takes milliseconds that would be counted as the server's.
    What is not part of a cycle goes all the same."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
