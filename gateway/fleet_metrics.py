"""What the directory and the news between gateways tell Prometheus, read at every scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache.directory_stats import DirectoryStats
from gateway.kv_events.vllm_zmq import FollowerStats
from gateway.news.fleet_news import FleetNews


class FleetCollector(Collector):
    """Tells nothing until there is a fleet to ask."""

    def __init__(self) -> None:
        self._read: Callable[[], DirectoryStats] | None = None
        self._news: FleetNews | None = None
        self._followers: Callable[[], Mapping[str, FollowerStats]] = dict

    def watch(
        self,
        directory: Callable[[], DirectoryStats],
        news: FleetNews,
        followers: Callable[[], Mapping[str, FollowerStats]],
    ) -> None:
        """Ask these; all must be cheap and safe from any thread."""
        self._read, self._news, self._followers = directory, news, followers

    def collect(self) -> Iterator[Metric]:
        """One reading of both."""
        if self._read is not None:
            yield from _directory(self._read())
        if self._news is not None:
            yield from _news(self._news)
        if followers := self._followers():
            yield from _kv_events(followers)


def _directory(stats: DirectoryStats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "forebay_directory_blocks",
        "Blocks that any replica is believed to hold.",
        value=stats.blocks,
    )
    yield GaugeMetricFamily(
        "forebay_directory_bytes", "Memory that the directory takes.", value=stats.bytes_estimate
    )
    replicas = GaugeMetricFamily(
        "forebay_directory_replica_blocks",
        "Blocks that each replica is believed to hold, by how that is known.",
        labels=("replica", "known"),
    )
    for name, blocks in stats.replicas.items():
        replicas.add_metric((name, "device"), blocks.device)
        replicas.add_metric((name, "dram"), blocks.dram)
        replicas.add_metric((name, "routed"), blocks.routed)
    yield replicas
    for name, text, value in (
        ("refused", "Blocks that the directory had no room for.", stats.refused),
        ("gaps", "Times that something a replica told was missed.", stats.gaps),
        (
            "corrections",
            "Entries forgotten because a replica served less than was expected.",
            stats.corrections,
        ),
        (
            "contradictions",
            "Times that a replica did not serve what it had told that it holds.",
            stats.contradictions,
        ),
    ):
        yield CounterMetricFamily(f"forebay_directory_{name}", text, value=value)


def _kv_events(followers: Mapping[str, FollowerStats]) -> Iterator[Metric]:
    labels = ("replica",)
    connected = GaugeMetricFamily(
        "forebay_kv_events_connected", "1 while a server's KV events come in.", labels=labels
    )
    gaps = CounterMetricFamily(
        "forebay_kv_events_gaps", "Times that KV events were missed for good.", labels=labels
    )
    unreadable = CounterMetricFamily(
        "forebay_kv_events_unreadable", "KV events that could not be read.", labels=labels
    )
    blocks = CounterMetricFamily(
        "forebay_kv_events_blocks",
        "Blocks that servers told of, followed or why not.",
        labels=("replica", "result"),
    )
    for name, stats in followers.items():
        connected.add_metric((name,), float(stats.connected))
        gaps.add_metric((name,), stats.gaps)
        unreadable.add_metric((name,), stats.unreadable)
        blocks.add_metric((name, "tracked"), stats.tracked_blocks)
        for reason, count in stats.untracked_blocks.items():
            blocks.add_metric((name, reason.value), count)
    yield from (connected, gaps, unreadable, blocks)


def _news(news: FleetNews) -> Iterator[Metric]:
    counts = news.counts
    yield GaugeMetricFamily(
        "forebay_gateways", "Gateways that are alive as far as this one knows.", value=news.gateways
    )
    yield GaugeMetricFamily(
        "forebay_news_degraded",
        "1 while the other gateways cannot be told or heard.",
        value=float(news.degraded),
    )
    yield CounterMetricFamily(
        "forebay_news_sent_bytes", "Bytes of news given to Redis.", value=counts.sent_bytes
    )
    decisions = CounterMetricFamily(
        "forebay_news_decisions",
        "Decisions told to other gateways, or heard from them, by what became of them.",
        labels=("result",),
    )
    for result in ("told", "dropped", "heard", "unresolved", "refused"):
        decisions.add_metric((result,), getattr(counts, result))
    yield decisions
