"""Signals as callbacks of the event loop, for as long as a scope lasts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_signals(
    stop: Callable[[signal.Signals], None], reload: Callable[[], None]
) -> Iterator[None]:
    """SIGTERM and Ctrl-C call `stop`, each time, SIGHUP calls `reload`. For the main thread. What
    SIGHUP did before, it does again at the end."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGHUP)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGHUP, before)


@contextmanager
def hangups_ignored() -> Iterator[None]:
    """A scope in which SIGHUP does nothing, unless `on_signals` heeds it. For the main thread."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
