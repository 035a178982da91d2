"""Keeping torch's thread team out of short CPU work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run torch's CPU operations on the calling thread alone.

    Each parallel operation ends in a barrier. Over some dozens of operations of a few microseconds
    that gains little on idle cores, and on busy ones (an executor's own workers, another process) a
    barrier waits for a whole time slice: a sampling step of 2 ms then takes 300. Entering and
    leaving costs under a microsecond and does not disturb the team.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
