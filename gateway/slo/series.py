"""What became of one tenant's requests to one model, minute by minute over the last hour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.slo.sketch import Sketch, quantiles

BUCKET_S = 60.0
LONG_S, SHORT_S = 3600.0, 300.0
_SHARES = (0.5, 0.9, 0.95, 0.99)


class Tally(NamedTuple):
    """`answers` were let in and are over; to `promised` of them something was promised, and for
    `met` it was kept. `shed` more, to which it was promised too, were refused for want of room."""

    answers: int = 0
    promised: int = 0
    met: int = 0
    shed: int = 0

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(
            self.answers + other.answers,
            self.promised + other.promised,
            self.met + other.met,
            self.shed + other.shed,
        )

    @property
    def attainment(self) -> float | None:
        """The share of the requests that got what was promised; None if nothing was. Who was
        refused for want of room did not get it."""
        asked = self.promised + self.shed
        return self.met / asked if asked else None


class Percentiles(NamedTuple):
    """In seconds, within 5 %."""

    p50: float
    p90: float
    p95: float
    p99: float


class _Times:
    """Of one minute's answers."""

    __slots__ = ("publish", "tpot", "ttft")

    def __init__(self) -> None:
        self.ttft = Sketch()
        self.tpot = Sketch()
        self.publish = Sketch()


class _Bucket:
    """One minute. `times` are kept for the short window only: they take most of the room."""

    __slots__ = ("minute", "tally", "times")

    def __init__(self, minute: int) -> None:
        self.minute = minute
        self.tally = Tally()
        self.times: _Times | None = _Times()


class Latencies(NamedTuple):
    """Of the short window: to the first token, between tokens (of each answer the mean), and to the
    first text that is part of the answer. None where there were none."""

    ttft: Percentiles | None
    tpot: Percentiles | None
    publish: Percentiles | None


class Series:
    """Written on the event loop, read from any thread. Windows end with the minute under way."""

    def __init__(self) -> None:
        self.total = Tally()
        """Since the start."""
        self._buckets: list[_Bucket] = []

    def add(
        self,
        now_s: float,
        tally: Tally,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
        publish_s: float | None = None,
    ) -> None:
        """One more request."""
        self.total = self.total.plus(tally)
        bucket = self._bucket(int(now_s // BUCKET_S))
        bucket.tally = bucket.tally.plus(tally)
        times = bucket.times
        if times is None:
            return
        if ttft_s is not None:
            times.ttft.add(ttft_s)
        if tpot_s is not None:
            times.tpot.add(tpot_s)
        if publish_s is not None:
            times.publish.add(publish_s)

    def over(self, window_s: float, now_s: float) -> Tally:
        """All of the window."""
        tallies = [bucket.tally for bucket in self._within(window_s, now_s)]
        return Tally(*map(sum, zip(*tallies, strict=True)))

    def latencies(self, now_s: float) -> Latencies:
        """Of the short window."""
        kept = [bucket.times for bucket in self._within(SHORT_S, now_s)]
        times = [each for each in kept if each is not None]
        return Latencies(
            _percentiles([each.ttft for each in times]),
            _percentiles([each.tpot for each in times]),
            _percentiles([each.publish for each in times]),
        )

    def _bucket(self, minute: int) -> _Bucket:
        buckets = self._buckets
        if not buckets or buckets[-1].minute < minute:
            oldest = minute - int(LONG_S // BUCKET_S)
            # another list: who reads the one before is not disturbed
            buckets = [each for each in buckets if each.minute > oldest]
            for each in buckets:
                if each.minute <= minute - int(SHORT_S // BUCKET_S):
                    each.times = None
            buckets.append(_Bucket(minute))
            self._buckets = buckets
        return buckets[-1]

    def _within(self, window_s: float, now_s: float) -> list[_Bucket]:
        oldest = int(now_s // BUCKET_S) - int(window_s // BUCKET_S)
        return [each for each in self._buckets if each.minute > oldest]


def covered_s(window_s: float, now_s: float, since_s: float) -> float:
    """How much time a window has seen so far, if anything was noted from `since_s` on; at least a
    second."""
    begin_s = (now_s // BUCKET_S + 1) * BUCKET_S - window_s
    return max(1.0, now_s - max(begin_s, since_s))


def _percentiles(sketches: Sequence[Sketch]) -> Percentiles | None:
    found = quantiles(sketches, _SHARES)
    return None if found is None else Percentiles(*found)
