"""Whether the client was fit to measure: a slow client must not be taken for a slow server."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.record import ClientHealth
from loadtest.stats.distribution import percentile

LATE_S = 0.005
"""What the client may add to a 99th percentile."""
BUSY_SHARE = 0.9
"""From this share of a core on there is no room for bursts."""
_PROBE_S = 0.005


class LagProbe:
    """How late the event loop gets to what is due: a timer that should fire every 5 ms notes when
    it does. Bytes that come while the loop is busy, or while the machine gives this process no
    core, wait as long for their time stamps. Runs within its scope.

    The timers of libuv have a resolution of 1 ms; less than that is no lag.
    """

    def __init__(self, every_s: float = _PROBE_S) -> None:
        self._every_s = every_s
        self._due_s = array("d")
        self._at_s = array("d")
        self._timer: asyncio.TimerHandle | None = None
        self._next_s = 0.0

    def __enter__(self) -> LagProbe:
        self._set()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def lags(self) -> Lags:
        """What was seen so far."""
        # Copies: an array that a view is held of cannot grow.
        due_s, at_s = np.array(self._due_s), np.array(self._at_s)
        return Lags(due_s, at_s, self._every_s)

    def _set(self) -> None:
        self._next_s = time.perf_counter() + self._every_s
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._fire)

    def _fire(self) -> None:
        self._due_s.append(self._next_s)
        self._at_s.append(time.perf_counter())
        self._set()


@dataclass(frozen=True, slots=True, eq=False)
class Lags:
    """When a probe was due and when it came, both rising, on the clock of `time.perf_counter`."""

    due_s: NDArray[np.float64]
    at_s: NDArray[np.float64]
    every_s: float

    def longest_within(self, start_s: float, end_s: float) -> float:
        """The longest lag that overlaps a time, 0 for none."""
        first = np.searchsorted(self.at_s, start_s)
        behind = np.searchsorted(self.due_s, end_s, side="right")
        if first >= behind:
            return 0.0
        return max(0.0, float(np.max(self.at_s[first:behind] - self.due_s[first:behind])))

    def spread_s(self) -> list[float]:
        """The lags, each also as the probes would have had it that were not sent meanwhile: a long
        one weighs by how long it took, not as one among many."""
        lags: list[float] = []
        for lag_s in np.maximum(self.at_s - self.due_s, 0.0).tolist():
            lags.append(lag_s)
            while (lag_s := lag_s - self.every_s) > 0:
                lags.append(lag_s)
        return lags


@dataclass(frozen=True, slots=True)
class Strain:
    """What a run asked of its client: its lags, how late each request was sent, the share of a
    core that it took, and how many streams were open at most. `refused_sockets` were not to be had.
    """

    lags: Lags
    late_s: Sequence[float]
    cpu_share: float
    most_open: int
    refused_sockets: int = 0


def health_of(strain: Strain) -> ClientHealth:
    """What is to be thought of a client under such a strain."""
    lags = strain.lags.spread_s() or [0.0]
    late = strain.late_s or [0.0]
    lag_p99_s, late_p99_s = percentile(lags, 0.99), percentile(late, 0.99)
    return ClientHealth(
        lag_p99_s=lag_p99_s,
        lag_max_s=max(lags),
        late_p99_s=late_p99_s,
        late_max_s=max(late),
        cpu_share=strain.cpu_share,
        most_open=strain.most_open,
        complaints=tuple(_complaints(strain, lag_p99_s, late_p99_s)),
    )


def _complaints(strain: Strain, lag_p99_s: float, late_p99_s: float) -> Iterator[str]:
    distrust = "the client is too slow for this load, or its machine too busy"
    if late_p99_s > LATE_S:
        yield (
            f"one request in a hundred was sent over {late_p99_s * 1e3:.0f} ms late: {distrust}; "
            "the load was not the planned one"
        )
    if lag_p99_s > LATE_S:
        yield (
            f"one time stamp in a hundred may be over {lag_p99_s * 1e3:.0f} ms late: {distrust}; "
            "latencies are not to be trusted"
        )
    if strain.cpu_share > BUSY_SHARE:
        yield (
            f"the client took {strain.cpu_share:.0%} of one core: it has no room for bursts; "
            "latencies are not to be trusted"
        )
    if strain.refused_sockets:
        yield (
            f"{strain.refused_sockets} requests were not sent, because the client had no file "
            "descriptor or port left: raise `ulimit -n`"
        )
