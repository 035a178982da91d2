"""An engine's own numbers, read from every replica when somebody scrapes and never in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.report import EngineStats


class ReplicaCollector(Collector):
    """Reports the queue, pages and counters of every replica."""

    def __init__(self) -> None:
        self._watched: dict[str, tuple[str, Callable[[], EngineStats]]] = {}

    def watch(self, replica: str, model: str, stats: Callable[[], EngineStats]) -> None:
        """Ask this replica too; `stats` must be cheap and safe from any thread."""
        self._watched[replica] = (model, stats)

    def forget(self, replica: str) -> None:
        """Ask this one no more."""
        self._watched.pop(replica, None)

    def collect(self) -> Iterator[Metric]:
        """One reading of each replica."""
        labels = ["replica", "model"]
        waiting = GaugeMetricFamily("forebay_waiting", "Sequences in line.", labels=labels)
        running = GaugeMetricFamily("forebay_running", "Sequences in the batch.", labels=labels)
        pages = GaugeMetricFamily("forebay_pages", "KV pages by state.", labels=[*labels, "state"])
        alive = GaugeMetricFamily(
            "forebay_replica_alive", "1 while the step loop runs.", labels=labels
        )
        age = GaugeMetricFamily(
            "forebay_last_step_age_seconds",
            "Since the step loop last finished a step or found nothing to do.",
            labels=labels,
        )
        preemptions = CounterMetricFamily(
            "forebay_preemptions", "Sequences put back in line for want of pages.", labels=labels
        )
        steps = CounterMetricFamily("forebay_steps", "Engine steps.", labels=labels)
        for replica, (model, read) in list(self._watched.items()):
            stats, at = read(), [replica, model]
            waiting.add_metric(at, stats.waiting)
            running.add_metric(at, stats.running)
            pages.add_metric([*at, "free"], stats.pages_free)
            pages.add_metric([*at, "cached"], stats.pages_cached)
            pages.add_metric([*at, "held"], stats.pages_held)
            alive.add_metric(at, float(stats.alive))
            age.add_metric(at, stats.last_step_age_s)
            preemptions.add_metric(at, stats.preemptions)
            steps.add_metric(at, stats.steps)
        yield from (waiting, running, pages, alive, age, preemptions, steps)
