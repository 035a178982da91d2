"""Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal

from loadtest.live.interrupt import stopped_by_interrupt


async def test_the_first_interrupt_stops_and_the_second_is_as_everywhere() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stopped_by_interrupt() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await stop.wait()
        assert signal.getsignal(signal.SIGINT) is before


async def test_without_an_interrupt_all_is_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stopped_by_interrupt() as stop:
        assert signal.getsignal(signal.SIGINT) is not before

    assert signal.getsignal(signal.SIGINT) is before
    assert not stop.is_set()


async def test_a_thread_that_gets_no_signals_is_never_stopped() -> None:
    async def inside() -> bool:
        with stopped_by_interrupt() as stop:
            return stop.is_set()

    assert not await asyncio.to_thread(asyncio.run, inside())
