"""What limits tell Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.limits.counts import LimitCounts, no_refusals

_NONE = LimitCounts(refused=no_refusals())


class LimitsCollector(Collector):
    """Says zero until there is a limiter to ask."""

    def __init__(self) -> None:
        self._read: Callable[[], LimitCounts] = lambda: _NONE
        self._without_place = 0

    def watch(self, read: Callable[[], LimitCounts]) -> None:
        """Ask this at every scrape, from any thread."""
        self._read = read

    def note_no_place(self) -> None:
        """A request was refused before the limiter was asked: its tenant has as many in flight as
        it may."""
        self._without_place += 1

    def collect(self) -> Iterator[Metric]:
        """One reading."""
        counts = self._read()
        refusals = CounterMetricFamily(
            "forebay_limit_refusals",
            "Requests refused by a limit of their tenant.",
            labels=["kind"],
        )
        for kind, refused in counts.refused.items():
            without_place = self._without_place if kind == "concurrency" else 0
            refusals.add_metric([kind], refused + without_place)
        yield refusals
        yield GaugeMetricFamily(
            "forebay_limits_degraded",
            "1 while each gateway enforces its part of the limits by itself, or guesses budgets.",
            value=float(counts.degraded),
        )
        yield CounterMetricFamily(
            "forebay_limits_outages", "Times that Redis was lost to limits.", value=counts.outages
        )
        yield GaugeMetricFamily(
            "forebay_limits_journal",
            "What Redis is yet to be told of, in operations.",
            value=counts.journal,
        )
        yield CounterMetricFamily(
            "forebay_limits_memory_losses",
            "Times that Redis came back without what it had been told of a tenant.",
            value=counts.memory_losses,
        )
        yield CounterMetricFamily(
            "forebay_limits_ledger_failures",
            "Times that the ledger could not say what a budget has been spent on.",
            value=counts.ledger_failures,
        )
