"""How near each engine of ours comes to what its device can do: MFU and MBU.

Steps that compute prompts and steps that only decode are told apart: what is good for the one says
nothing of the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.report import Peaks, StepReport, StepWork

KINDS = ("prefill", "decode")

_WINDOW_S = 60.0
_SLOTS = 12
_SLOT_S = _WINDOW_S / _SLOTS
_CREDIBLE = 4.0
"""A device may do so many times as much as was measured while others used it."""


class Utilization(NamedTuple):
    """Of the time in steps of one kind, over the last minute: the share of the device's FLOP/s that
    the model's arithmetic took, and of its memory's bytes/s."""

    mfu: float
    mbu: float


@dataclass(slots=True)
class _Done:
    """Work, and the seconds of steps that it took."""

    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, flops: int, moved_bytes: int, seconds: float) -> None:
        self.flops += flops
        self.bytes += moved_bytes
        self.seconds += seconds

    def of(self, peaks: Peaks) -> Utilization | None:
        """None without a step."""
        if self.seconds <= 0.0:
            return None
        return Utilization(
            self.flops / self.seconds / peaks.flops_per_s,
            self.bytes / self.seconds / peaks.bytes_per_s,
        )


@dataclass(slots=True)
class _Kind:
    """One kind of a replica's steps: all of them, and those of the last minute, in slots of five
    seconds by their number."""

    total: _Done = field(default_factory=_Done)
    recent: dict[int, _Done] = field(default_factory=dict)

    def add(self, slot: int, flops: int, moved_bytes: int, seconds: float) -> None:
        done = self.recent.get(slot)
        if done is None:
            self._keep_from(slot)
            done = self.recent[slot] = _Done()
        for each in (done, self.total):
            each.add(flops, moved_bytes, seconds)

    def last_minute(self, slot: int) -> _Done:
        self._keep_from(slot)
        whole = _Done()
        for each in self.recent.values():
            whole.add(each.flops, each.bytes, each.seconds)
        return whole

    def _keep_from(self, slot: int) -> None:
        for old in [number for number in self.recent if number <= slot - _SLOTS]:
            del self.recent[old]


class _Replica:
    """What one replica can do, and has done."""

    __slots__ = ("kinds", "peaks")

    def __init__(self, peaks: Peaks | None) -> None:
        self.peaks = peaks
        self.kinds = {kind: _Kind() for kind in KINDS}

    def utilization(self, slot: int) -> dict[str, Utilization | None]:
        peaks = self.peaks
        return {
            name: None if peaks is None else kind.last_minute(slot).of(peaks)
            for name, kind in self.kinds.items()
        }


class UtilizationCollector(Collector):
    """Counts the work in the steps of every replica that it watches. Safe to call from any
    thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._watched: dict[str, _Replica] = {}

    def watch(self, replica: str, peaks: Peaks | None) -> None:
        """Count this one's steps, on a device that can do so much, None if that is not known."""
        with self._lock:
            self._watched[replica] = _Replica(peaks)

    def measured(self, replica: str, peaks: Peaks | None) -> None:
        """A replica that is watched has begun a new life, and measured its device again: steps of
        the life before are not held against that."""
        with self._lock:
            if (watched := self._watched.get(replica)) is not None:
                watched.peaks = peaks
                for kind in watched.kinds.values():
                    kind.recent.clear()

    def forget(self, replica: str) -> None:
        """It is there no longer. What still comes of its steps is counted nowhere."""
        with self._lock:
            self._watched.pop(replica, None)

    def observe(self, replica: str, report: StepReport) -> None:
        """One step of it, if it says what was in it. A step that did better than what was measured
        shows that the device can do so much: it was measured while others used it."""
        work = report.work
        if work is None:
            return
        with self._lock:
            if (watched := self._watched.get(replica)) is not None:
                kind = watched.kinds["prefill" if work.prefill else "decode"]
                kind.add(self._slot(), work.flops, work.bytes, report.seconds)
                if watched.peaks is not None:
                    watched.peaks = _at_least(watched.peaks, work, report.seconds)

    def of(self, replica: str) -> Mapping[str, Utilization | None]:
        """By kind of step; None without one in the last minute, or where nothing is known."""
        with self._lock:
            if (watched := self._watched.get(replica)) is None:
                return dict.fromkeys(KINDS)
            return watched.utilization(self._slot())

    def collect(self) -> Iterator[Metric]:
        """What each has done, what it can do, and how near it came to that."""
        by_kind, by_replica = ("replica", "kind"), ("replica",)
        flops = CounterMetricFamily(
            "forebay_step_flops", "Arithmetic that steps' models needed.", labels=by_kind
        )
        moved = CounterMetricFamily(
            "forebay_step_bytes", "Bytes that steps had to read and write.", labels=by_kind
        )
        busy = CounterMetricFamily(
            "forebay_step_busy_seconds", "Time in engine steps.", labels=by_kind
        )
        peak_flops = GaugeMetricFamily(
            "forebay_peak_flops", "FLOP/s that the device was measured to do.", labels=by_replica
        )
        peak_bytes = GaugeMetricFamily(
            "forebay_peak_memory_bytes_per_second",
            "Bytes/s that the device's memory was measured to give.",
            labels=by_replica,
        )
        mfu = GaugeMetricFamily(
            "forebay_mfu", "Model FLOPs utilization in the last minute's steps.", labels=by_kind
        )
        mbu = GaugeMetricFamily(
            "forebay_mbu", "Model bandwidth utilization in the last minute's steps.", labels=by_kind
        )
        with self._lock:
            for name, replica in self._watched.items():
                if (peaks := replica.peaks) is not None:
                    peak_flops.add_metric((name,), peaks.flops_per_s)
                    peak_bytes.add_metric((name,), peaks.bytes_per_s)
                for kind, used in replica.utilization(self._slot()).items():
                    at, total = (name, kind), replica.kinds[kind].total
                    flops.add_metric(at, total.flops)
                    moved.add_metric(at, total.bytes)
                    busy.add_metric(at, total.seconds)
                    if used is not None:
                        mfu.add_metric(at, used.mfu)
                        mbu.add_metric(at, used.mbu)
        yield from (flops, moved, busy, peak_flops, peak_bytes, mfu, mbu)

    def _slot(self) -> int:
        return int(self._clock() // _SLOT_S)


def _at_least(peaks: Peaks, work: StepWork, seconds: float) -> Peaks:
    """Peaks that are not below what a step has reached; one that reached very much more was timed
    wrong."""
    if work.flops <= peaks.flops_per_s * seconds and work.bytes <= peaks.bytes_per_s * seconds:
        return peaks
    if seconds <= 0.0:
        return peaks
    reached = Peaks(
        max(peaks.flops_per_s, work.flops / seconds), max(peaks.bytes_per_s, work.bytes / seconds)
    )
    credible = (
        reached.flops_per_s <= _CREDIBLE * peaks.flops_per_s
        and reached.bytes_per_s <= _CREDIBLE * peaks.bytes_per_s
    )
    return reached if credible else peaks
