"""What signals do before, while and after a server heeds them."""

from __future__ import annotations

import asyncio
import os
import signal

from gateway.signals import hangups_ignored, on_signals


def test_hangups_do_nothing_before_and_after_they_are_heeded() -> None:
    heard = asyncio.Event()

    async def heed() -> None:
        with on_signals(lambda _: None, heard.set):
            os.kill(os.getpid(), signal.SIGHUP)
            async with asyncio.timeout(5):
                await heard.wait()

    before = signal.getsignal(signal.SIGHUP)
    with hangups_ignored():
        asyncio.run(heed())
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # what is kept has to be saved yet
    assert signal.getsignal(signal.SIGHUP) is before
