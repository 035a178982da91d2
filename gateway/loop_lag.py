"""How long the event loop keeps its timers waiting: the stalls that every stream would feel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_INTERVAL_S = 0.005


@contextmanager
def watch_loop_lag(
    observe: Callable[[float], None], *, interval_s: float = _INTERVAL_S
) -> Iterator[None]:
    """Time a timer of the running loop again and again; `observe` gets each lag in seconds.

    A stall that begins between two timers is seen shorter by at most `interval_s`. A bare timer
    rather than a task: at this rate a task's wake-up would cost more than what it measures.
    """
    loop = asyncio.get_running_loop()
    # The loop's own clock may stand still while a callback runs and tick in whole milliseconds.
    due = time.monotonic() + interval_s
    handle: asyncio.TimerHandle

    def tick() -> None:
        nonlocal due, handle
        now = time.monotonic()
        observe(max(0.0, now - due))
        due = now + interval_s
        handle = loop.call_later(interval_s, tick)

    handle = loop.call_later(interval_s, tick)
    try:
        yield
    finally:
        handle.cancel()
