"""What the ledger tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.ledger.writer import LedgerStats

_NONE = LedgerStats(written=0, spooled=0, lost=0, waiting=0, spool_bytes=0, lag_s=0.0)


class LedgerCollector(Collector):
    """Says zero until there is a ledger to ask."""

    def __init__(self) -> None:
        self._read: Callable[[], LedgerStats] = lambda: _NONE

    def watch(self, read: Callable[[], LedgerStats]) -> None:
        """Ask this at every scrape."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """One reading."""
        stats = self._read()
        yield GaugeMetricFamily(
            "forebay_ledger_lag_seconds",
            "Age of the oldest row of the ledger that its database lacks.",
            value=stats.lag_s,
        )
        yield GaugeMetricFamily(
            "forebay_ledger_waiting_rows",
            "Rows of the ledger that are in memory only.",
            value=stats.waiting,
        )
        yield GaugeMetricFamily(
            "forebay_ledger_spool_bytes",
            "Size of the rows that wait in a file for the ledger's database.",
            value=stats.spool_bytes,
        )
        rows = CounterMetricFamily(
            "forebay_ledger_rows",
            "Rows of the ledger by what became of them; a spooled one is written later.",
            labels=("result",),
        )
        rows.add_metric(("written",), stats.written)
        rows.add_metric(("spooled",), stats.spooled)
        rows.add_metric(("lost",), stats.lost)
        yield rows
