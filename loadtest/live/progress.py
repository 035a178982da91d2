"""How far a run is, for who watches it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

_EVERY_S = 0.25


class Progress(NamedTuple):
    """Requests so far: `planned` in all, `sent`, `ended`, of which `failed`, and `open` now."""

    elapsed_s: float
    planned: int
    sent: int
    ended: int
    failed: int
    open: int
    output_tokens: int


OnProgress = Callable[[Progress], None]
"""Called four times a second and at the end, on the event loop: what it takes delays the client."""


@dataclass(slots=True)
class Tally:
    """What the requests of a run have come to. `cut` were open when it was stopped, `unsent` were
    not sent since an earlier turn of their session had failed, and `vague` were turned away for
    want of room without being told when to come again."""

    ended: int = 0
    failed: int = 0
    open: int = 0
    most_open: int = 0
    output_tokens: int = 0
    cut: int = 0
    unsent: int = 0
    vague: int = 0
    refused_sockets: int = 0

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """While one request is open."""
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            yield
        except asyncio.CancelledError:
            self.cut += 1
            raise
        finally:
            self.open -= 1

    def progress(self, planned: int, began_s: float) -> Progress:
        """As it is now; `began_s` on the clock of `time.perf_counter`."""
        return Progress(
            elapsed_s=max(0.0, time.perf_counter() - began_s),
            planned=planned,
            sent=self.ended + self.open,
            ended=self.ended,
            failed=self.failed,
            open=self.open,
            output_tokens=self.output_tokens,
        )


@contextmanager
def reported(on_progress: OnProgress | None, now: Callable[[], Progress]) -> Iterator[None]:
    """Tell `on_progress` within the scope, and once more at its end."""
    if on_progress is None:
        yield
        return
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def tell() -> None:
        nonlocal timer
        timer = loop.call_later(_EVERY_S, tell)
        on_progress(now())

    tell()
    try:
        yield
    finally:
        timer.cancel()
        on_progress(now())
