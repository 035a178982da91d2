"""Ctrl-C ends a run, not the program: what has been measured is worth keeping."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stopped_by_interrupt() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C within the scope sets; the second is as everywhere. Only the
    main thread gets signals: in another the event is never set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def as_before() -> None:
        if loop.remove_signal_handler(signal.SIGINT):
            signal.signal(signal.SIGINT, before)

    def interrupted() -> None:
        as_before()
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        as_before()
