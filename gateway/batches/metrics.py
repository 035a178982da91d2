"""What batches tell Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(slots=True)
class BatchCounts:
    """One gateway's. `runnable` batches have lines to run, of all gateways, as far as is known;
    `running` lines run here. `answered` and `failed` lines are over, `put_back` ones are to be
    tried again."""

    runnable: int = 0
    running: int = 0
    answered: int = 0
    failed: int = 0
    put_back: int = 0


class BatchCollector(Collector):
    """Says zero until there are batches to ask about."""

    def __init__(self) -> None:
        self._read: Callable[[], BatchCounts] = BatchCounts

    def watch(self, read: Callable[[], BatchCounts]) -> None:
        """Ask this at every scrape, from any thread."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """One reading."""
        counts = self._read()
        yield GaugeMetricFamily(
            "forebay_batches_runnable", "Batches that have lines to run.", value=counts.runnable
        )
        yield GaugeMetricFamily(
            "forebay_batch_lines_running", "Lines of batches that run here.", value=counts.running
        )
        lines = CounterMetricFamily(
            "forebay_batch_lines", "Lines of batches that were run here.", labels=["result"]
        )
        lines.add_metric(["answered"], counts.answered)
        lines.add_metric(["failed"], counts.failed)
        lines.add_metric(["put_back"], counts.put_back)
        yield lines
