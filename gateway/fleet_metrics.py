"""What the directory, servers elsewhere and the news between gateways tell Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache.directory_stats import DirectoryStats
from gateway.kv_events.vllm_zmq import FollowerStats
from gateway.news.fleet_news import FleetNews


class FleetCollector(Collector):
    """Has no samples until there is a fleet to ask."""

    def __init__(self) -> None:
        self._read: Callable[[], DirectoryStats] | None = None
        self._news: FleetNews | None = None
        self._followers: Callable[[], Mapping[str, FollowerStats]] = dict
        self._isolation_failures: Callable[[], Mapping[str, int]] = dict

    def watch(
        self,
        directory: Callable[[], DirectoryStats],
        news: FleetNews,
        followers: Callable[[], Mapping[str, FollowerStats]],
        isolation_failures: Callable[[], Mapping[str, int]],
    ) -> None:
        """Ask these; all must be cheap and safe from any thread."""
        self._read, self._news, self._followers = directory, news, followers
        self._isolation_failures = isolation_failures

    def collect(self) -> Iterator[Metric]:
        """One reading of each."""
        if self._read is not None:
            yield from _directory(self._read())
        if self._news is not None:
            yield from _news(self._news)
        if followers := self._followers():
            yield from _kv_events(followers)
        yield _isolation(self._isolation_failures())


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


def _isolation(failures: Mapping[str, int]) -> Metric:
    counter = CounterMetricFamily(
        "forebay_remote_isolation_failures",
        "Answers that used a cache which their requests were to share with nobody.",
        labels=("replica",),
    )
    for name, count in failures.items():
        counter.add_metric((name,), count)
    return counter


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
