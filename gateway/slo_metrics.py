"""What is told to Prometheus of promises: how they are kept, and who is let in."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.slo.admission import Admission
from gateway.slo.windowed_book import BurnReport, SloReport, WindowedSloBook

_QUANTILES = ("0.5", "0.9", "0.95", "0.99")


class SloCollector(Collector):
    """Has no samples until there is a book to read. Labels are tenants and models that have had
    requests, of which the book keeps a bounded number; of tenants that are gone there is nothing to
    be told, lest somebody be alarmed by promises to nobody."""

    def __init__(self) -> None:
        self._book: WindowedSloBook | None = None
        self._admission: Admission | None = None
        self._shown: frozenset[str] | None = None

    def watch(self, book: WindowedSloBook, admission: Admission) -> None:
        """Read these at every scrape."""
        self._book, self._admission = book, admission

    def show(self, tenants: frozenset[str]) -> None:
        """Tell of these tenants alone; of all before it was said who there is."""
        self._shown = tenants

    def collect(self) -> Iterator[Metric]:
        """One reading of each."""
        if self._book is not None:
            yield from _promises(
                [each for each in self._book.reports() if self._shows(each.tenant)]
            )
            yield from _budgets([each for each in self._book.burns() if self._shows(each.tenant)])
        if self._admission is not None:
            yield from _admission(self._admission)

    def _shows(self, tenant: str) -> bool:
        return self._shown is None or tenant in self._shown


def _promises(reports: list[SloReport]) -> Iterator[Metric]:
    labels = ("tenant", "model")
    attainment = GaugeMetricFamily(
        "forebay_slo_attainment",
        "Share of the last hour's requests that got what was promised; refused for want of room "
        "counts as not.",
        labels=labels,
    )
    goodput = GaugeMetricFamily(
        "forebay_goodput_rps",
        "Answers per second of the last five minutes that kept what was promised.",
        labels=labels,
    )
    requests = CounterMetricFamily(
        "forebay_slo_requests",
        "Requests to which something was promised, by whether it was kept.",
        labels=(*labels, "met"),
    )
    latency = GaugeMetricFamily(
        "forebay_slo_latency_seconds",
        "Of the last five minutes, within 5 %: to the first token, between tokens, to the first "
        "text of the answer.",
        labels=(*labels, "of", "quantile"),
    )
    for report in reports:
        at = (report.tenant, report.model)
        total = report.total
        if total.promised or total.shed:
            goodput.add_metric(at, report.goodput_rps)
            requests.add_metric((*at, "yes"), total.met)
            requests.add_metric((*at, "no"), total.promised - total.met)
            requests.add_metric((*at, "shed"), total.shed)
        if (share := report.hour.attainment) is not None:
            attainment.add_metric(at, share)
        for of, percentiles in report.latencies._asdict().items():
            for quantile, seconds in zip(_QUANTILES, percentiles or (), strict=False):
                latency.add_metric((*at, of, quantile), seconds)
    yield from (attainment, goodput, requests, latency)


def _budgets(burns: list[BurnReport]) -> Iterator[Metric]:
    rate = GaugeMetricFamily(
        "forebay_slo_burn_rate",
        "How many times as fast as it may, a tenant's error budget is being spent.",
        labels=("tenant", "window"),
    )
    weight = GaugeMetricFamily(
        "forebay_slo_effective_weight",
        "What a tenant weighs in its class: its weight, raised while its budget burns too fast.",
        labels=("tenant",),
    )
    for burn in burns:
        rate.add_metric((burn.tenant, "5m"), burn.short)
        rate.add_metric((burn.tenant, "1h"), burn.long)
        weight.add_metric((burn.tenant,), burn.weight)
    yield from (rate, weight)


def _admission(admission: Admission) -> Iterator[Metric]:
    rulings = CounterMetricFamily(
        "forebay_admissions",
        "What was decided about requests that came, and why they were not let in at once.",
        labels=("model", "verdict", "reason"),
    )
    for (model, verdict, reason), count in admission.rulings.copy().items():
        rulings.add_metric((model, verdict.value, reason), count)
    waiting = GaugeMetricFamily(
        "forebay_admission_waiting",
        "Requests that wait in front of a model until there is room.",
        labels=("model",),
    )
    for model, count in admission.waiting.items():
        waiting.add_metric((model,), count)
    yield from (rulings, waiting)
