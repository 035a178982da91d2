"""MFU and MBU: of which steps they are, for how long, and of whom."""

from __future__ import annotations

import pytest

from engine.report import EngineStats, Peaks, StepReport, StepWork
from gateway.metrics import Metrics
from gateway.utilization_metrics import Utilization, UtilizationCollector

STATS = EngineStats(0, 1, 1, 0, 1, 2, 0, 1, True, 0.0)
PEAKS = Peaks(flops_per_s=1000.0, bytes_per_s=200.0)


def step(flops: int, moved_bytes: int, seconds: float, *, prefill: bool = False) -> StepReport:
    work = StepWork(flops, moved_bytes, prefill)
    return StepReport((), seconds, 1, 1, STATS, work=work)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def samples(collector: UtilizationCollector) -> dict[tuple[str, ...], float]:
    """Every series by its name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def test_kinds_are_apart_and_a_step_counts_by_its_time() -> None:
    collector = UtilizationCollector(Clock())
    collector.watch("m/0", PEAKS)
    collector.observe("m/0", step(900, 10, 1.0, prefill=True))
    collector.observe("m/0", step(50, 100, 1.0))
    collector.observe("m/0", step(50, 140, 1.0))
    assert collector.of("m/0") == {
        "prefill": Utilization(0.9, 0.05),
        "decode": Utilization(pytest.approx(0.05), pytest.approx(0.6)),
    }
    seen = samples(collector)
    assert seen["forebay_step_flops_total", "m/0", "decode"] == 100
    assert seen["forebay_step_bytes_total", "m/0", "decode"] == 240
    assert seen["forebay_step_busy_seconds_total", "m/0", "decode"] == 2.0
    assert seen["forebay_step_flops_total", "m/0", "prefill"] == 900
    assert seen["forebay_peak_flops", "m/0"] == 1000.0
    assert seen["forebay_peak_memory_bytes_per_second", "m/0"] == 200.0
    assert seen["forebay_mfu", "m/0", "prefill"] == 0.9
    assert seen["forebay_mbu", "m/0", "decode"] == pytest.approx(0.6)


def test_what_is_older_than_a_minute_counts_in_the_totals_alone() -> None:
    clock = Clock()
    collector = UtilizationCollector(clock)
    collector.watch("m/0", PEAKS)
    collector.observe("m/0", step(100, 20, 1.0))
    clock.now_s += 40
    collector.observe("m/0", step(300, 20, 1.0))
    assert collector.of("m/0")["decode"] == Utilization(pytest.approx(0.2), pytest.approx(0.1))
    clock.now_s += 40
    assert collector.of("m/0")["decode"] == Utilization(pytest.approx(0.3), pytest.approx(0.1))
    clock.now_s += 40
    assert collector.of("m/0") == {"prefill": None, "decode": None}
    seen = samples(collector)
    assert seen["forebay_step_flops_total", "m/0", "decode"] == 400
    assert not [name for name, *_ in seen if name in ("forebay_mfu", "forebay_mbu")]


def test_memory_does_not_grow_with_time() -> None:
    clock = Clock()
    collector = UtilizationCollector(clock)
    collector.watch("m/0", PEAKS)
    for _ in range(200):
        clock.now_s += 5
        collector.observe("m/0", step(1, 1, 0.1))
    assert len(collector._watched["m/0"].kinds["decode"].recent) <= 12


def test_a_new_life_has_new_peaks_and_goes_on_counting() -> None:
    collector = UtilizationCollector(Clock())
    collector.measured("m/0", PEAKS)  # nobody watches it yet
    assert samples(collector) == {}
    collector.watch("m/0", None)
    collector.observe("m/0", step(500, 100, 1.0))
    assert collector.of("m/0") == {"prefill": None, "decode": None}
    assert ("forebay_peak_flops", "m/0") not in samples(collector)
    collector.measured("m/0", PEAKS)
    assert collector.of("m/0")["decode"] is None  # its steps were the other life's
    collector.observe("m/0", step(250, 50, 1.0))
    assert collector.of("m/0")["decode"] == Utilization(0.25, 0.25)
    assert samples(collector)["forebay_step_flops_total", "m/0", "decode"] == 750


def test_a_step_that_does_better_than_was_measured_raises_the_peaks() -> None:
    collector = UtilizationCollector(Clock())
    collector.watch("m/0", PEAKS)
    collector.observe("m/0", step(500, 100, 1.0))
    collector.observe("m/0", step(100, 400, 1.0))
    assert collector.of("m/0")["decode"] == Utilization(pytest.approx(0.3), pytest.approx(0.625))
    seen = samples(collector)
    assert seen["forebay_peak_flops", "m/0"] == 1000.0
    assert seen["forebay_peak_memory_bytes_per_second", "m/0"] == 400.0
    for seconds in (0.0, 1e-6):  # of hardly any time: no proof of anything
        collector.observe("m/0", step(100, 400, seconds))
        seen = samples(collector)
        assert seen["forebay_peak_flops", "m/0"] == 1000.0
        assert seen["forebay_peak_memory_bytes_per_second", "m/0"] == 400.0


def test_series_go_with_their_replica_and_late_steps_do_not_bring_them_back() -> None:
    metrics = Metrics(["m"], [], b"secret")
    before = metrics.render()
    metrics.utilization.watch("m/0", PEAKS)
    metrics.observe_step("m/0", step(500, 100, 1.0))
    assert b'forebay_mfu{kind="decode",replica="m/0"} 0.5' in metrics.render()
    metrics.forget_replica("m/0")
    assert metrics.render() == before
    metrics.utilization.observe("m/0", step(500, 100, 1.0))
    assert metrics.render() == before
    assert metrics.utilization.of("m/0") == {"prefill": None, "decode": None}
