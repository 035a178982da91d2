"""The account of promises: what it says of the last hour, and what tenants weigh because of it."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from gateway.slo.admission import Admission
from gateway.slo.windowed_book import WindowedSloBook
from gateway.slo_metrics import SloCollector
from gateway.tenants import Tenant
from policies.admission import Verdict
from policies.service_class import ServiceClass
from policies.slo import LatestTimes, Slo
from tests.gateway.slo.no_book import NoSloBook
from tests.gateway.stage import tenant

PROMISE = Slo(ttft_s=0.5, tpot_s=0.1, target=0.9)
ACME = tenant("acme", slo=PROMISE, weight=2.0)
BETA = tenant("beta", slo=PROMISE)
QUIET = tenant("quiet")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Stage:
    def __init__(self) -> None:
        self.clock = Clock()
        self.book = WindowedSloBook(self.clock)

    def note(
        self,
        who: Tenant = ACME,
        model: str = "m",
        *,
        times: int = 1,
        ttft_s: float | None = 0.2,
        tpot_s: float | None = 0.05,
        promised: bool = True,
    ) -> bool | None:
        met = None
        for _ in range(times):
            met = self.book.note(
                who, model, promised=promised, ttft_s=ttft_s, tpot_s=tpot_s, publish_s=ttft_s
            )
        return met

    def later(self, seconds: float) -> None:
        self.clock.now_s += seconds


def test_a_promise_is_kept_or_not_or_there_is_none() -> None:
    stage = Stage()
    assert stage.note() is True
    assert stage.note(ttft_s=0.6) is False
    assert stage.note(tpot_s=0.2) is False
    assert stage.note(ttft_s=None, tpot_s=None) is False
    assert stage.note(promised=False) is None


def test_an_answer_of_which_only_the_end_was_seen_breaks_no_promise() -> None:
    stage = Stage()

    def note(ttft_s: float, tpot_s: float | None) -> bool | None:
        return stage.book.note(
            ACME,
            "m",
            promised=True,
            ttft_s=None,
            tpot_s=None,
            publish_s=None,
            at_most=LatestTimes(ttft_s, tpot_s),
        )

    assert note(0.4, 0.05) is True
    assert note(0.4, None) is True
    assert note(0.6, 0.05) is None  # who knows when its first token came
    assert note(0.4, 0.2) is None
    report = stage.book.report(ACME.id, "m")
    assert report is not None
    assert (report.hour.answers, report.hour.promised, report.hour.met) == (4, 2, 2)
    assert stage.note(QUIET) is None
    for book in (stage.book, NoSloBook()):
        assert book.note(ACME, "m", promised=True, ttft_s=0.1, tpot_s=None, publish_s=None) is True


def test_attainment_and_goodput_of_a_tenant_at_a_model() -> None:
    stage = Stage()
    stage.note(times=6)
    stage.note(times=2, ttft_s=0.9)
    stage.note(ACME, "big")
    stage.book.shed(ACME, "m")
    stage.book.shed(ACME, "m")
    stage.book.shed(ACME, "m", promised=False)
    stage.later(30)
    report = stage.book.report("acme", "m")
    assert report is not None
    assert report.hour == (8, 8, 6, 2)
    assert report.hour.attainment == 0.6
    assert report.goodput_rps == pytest.approx(6 / 30)
    assert {(each.tenant, each.model) for each in stage.book.reports()} == {
        ("acme", "m"),
        ("acme", "big"),
    }
    assert stage.book.report("acme", "other") is None
    [burn] = stage.book.burns()
    # 7 of 11 kept where 9 of 10 were promised
    assert burn.short == burn.long == pytest.approx((4 / 11) / 0.1)


def test_percentiles_are_within_five_percent_and_of_the_last_minutes() -> None:
    stage = Stage()
    stage.note(times=50, ttft_s=9.0)
    stage.later(360)
    for number in range(1, 101):
        stage.note(ttft_s=number / 100, tpot_s=None)
    report = stage.book.report("acme", "m")
    assert report is not None
    assert report.latencies.ttft is not None
    assert list(report.latencies.ttft) == [
        pytest.approx(value, rel=0.051) for value in (0.5, 0.9, 0.95, 0.99)
    ]
    assert report.latencies.publish == report.latencies.ttft
    assert report.latencies.tpot is None
    assert report.goodput_rps == pytest.approx(50 / 300, rel=0.25)


def test_what_is_older_than_an_hour_is_forgotten_but_for_the_total() -> None:
    stage = Stage()
    stage.note(times=5, ttft_s=2.0)
    stage.later(3500)
    stage.note(times=5)
    report = stage.book.report("acme", "m")
    assert report is not None
    assert report.hour.attainment == 0.5
    stage.later(200)
    stage.note(times=5)
    report = stage.book.report("acme", "m")
    assert report is not None
    assert (report.hour.attainment, report.total) == (1.0, (15, 15, 10, 0))
    stage.later(100_000)
    report = stage.book.report("acme", "m")
    assert report is not None
    assert (report.hour.attainment, report.goodput_rps, report.latencies.ttft) == (None, 0.0, None)


def test_what_is_kept_is_bounded() -> None:
    stage = Stage()
    for _ in range(200):
        stage.note()
        stage.later(60)
    buckets = stage.book._series["acme", "m"]._buckets
    assert len(buckets) == 60
    assert sum(bucket.times is not None for bucket in buckets) == 5


def weights(stage: Stage, *who: Tenant) -> list[float]:
    """After what was noted has gone on for a minute."""
    for _ in range(12):
        stage.later(5)
        found = [stage.book.weight_of(each) for each in who]
    return found


def test_who_is_let_down_weighs_more_until_it_is_not() -> None:
    stage = Stage()
    assert stage.book.weight_of(ACME) == 2.0
    stage.note(ACME, times=100, ttft_s=2.0)
    for who in (BETA, tenant("gamma", slo=PROMISE)):
        stage.note(who, times=100)
    acme, beta = weights(stage, ACME, BETA)
    assert acme == pytest.approx(4.0)
    assert beta == pytest.approx(0.8)
    stage.later(360)
    stage.note(ACME, times=100)
    assert weights(stage, ACME, BETA) == [2.0, 1.0]


def test_who_is_refused_for_asking_too_much_weighs_no_more_for_that() -> None:
    stage = Stage()
    for _ in range(500):
        stage.book.shed(ACME, "m")
    stage.note(ACME, times=50)
    stage.note(BETA, times=50)
    assert weights(stage, ACME, BETA) == [2.0, 1.0]
    assert max(burn.short for burn in stage.book.burns()) > 5


def test_tenants_are_held_against_those_of_their_class() -> None:
    stage = Stage()
    batch = tenant("batch", slo=PROMISE, service_class=ServiceClass.BATCH)
    stage.note(batch, times=100, ttft_s=2.0)
    stage.note(ACME, times=100)
    assert weights(stage, batch, ACME) == [1.0, 2.0]


def test_no_more_than_so_many_tenants_and_models_are_kept() -> None:
    stage = Stage()
    for number in range(2100):
        stage.note(tenant(f"t{number}", slo=PROMISE), times=1)
        stage.note(ACME)
    assert len(stage.book.reports()) == 2000
    assert len(stage.book._tenants) == 2000
    assert stage.book.report("acme", "m") is not None
    assert stage.book.report("t0", "m") is None


def test_what_prometheus_is_told() -> None:
    registry, collector = CollectorRegistry(), SloCollector()
    registry.register(collector)
    assert registry.get_sample_value("forebay_slo_attainment", {}) is None
    stage, admission = Stage(), Admission()
    collector.watch(stage.book, admission)
    stage.note(times=8)
    stage.note(times=2, ttft_s=0.9)
    stage.book.shed(ACME, "m")
    stage.note(QUIET, times=3)
    admission.rulings["m", Verdict.SHED, "slo"] += 1
    at = {"tenant": "acme", "model": "m"}

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("forebay_slo_attainment", **at) == pytest.approx(8 / 11)
    assert value("forebay_goodput_rps", **at) == 8.0
    for met, count in (("yes", 8), ("no", 2), ("shed", 1)):
        assert value("forebay_slo_requests_total", **at, met=met) == count
    assert value("forebay_slo_burn_rate", tenant="acme", window="5m") == pytest.approx(30 / 11)
    assert value("forebay_slo_burn_rate", tenant="acme", window="1h") == pytest.approx(30 / 11)
    assert value("forebay_slo_effective_weight", tenant="acme") == 2.0
    assert value("forebay_slo_latency_seconds", **at, of="ttft", quantile="0.5") == pytest.approx(
        0.2, rel=0.051
    )
    assert value("forebay_admissions_total", model="m", verdict="shed", reason="slo") == 1
    # nothing was promised to it: there is nothing to be kept, but it took time
    quiet = {"tenant": "quiet", "model": "m"}
    assert value("forebay_slo_attainment", **quiet) is None
    assert value("forebay_goodput_rps", **quiet) is None
    assert value("forebay_slo_latency_seconds", **quiet, of="tpot", quantile="0.99") is not None
