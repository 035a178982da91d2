"""The cache's own numbers, read from every replica when somebody scrapes and never in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache.block import Tier
from cache.report import CacheStats, Miss, TierStats

OTHERS = "other"
"""Whose KV is that no configured tenant owns: mostly a removed one's."""

DROPS = ("busy", "no_room", "quota", "too_big", "refused", "error", "not_worth_it")
"""Why a tier did not take a block; what else a replica says is counted under "other"."""

_BY_TIER = ("replica", "tier")


@dataclass(frozen=True, slots=True)
class _Watched:
    model: str
    read: Callable[[], CacheStats]


class CacheCollector(Collector):
    """Reports the tiers of every replica, and what each tenant has in them."""

    def __init__(self, tenant_of_tag: Mapping[bytes, str]) -> None:
        """`tenant_of_tag` may grow: it is read at every scrape."""
        self._tenant_of_tag = tenant_of_tag
        self._watched: dict[str, _Watched] = {}

    def watch(self, replica: str, model: str, read: Callable[[], CacheStats]) -> None:
        """Ask this replica too; `read` must be cheap and safe from any thread."""
        self._watched[replica] = _Watched(model, read)

    def forget(self, replica: str) -> None:
        """Ask this one no more."""
        self._watched.pop(replica, None)

    def collect(self) -> Iterator[Metric]:
        """One consistent reading of each replica for all of its metrics."""
        stats = {name: (each.model, each.read()) for name, each in list(self._watched.items())}
        tiers = [(name, tier) for name, (_, cache) in stats.items() for tier in cache.tiers]
        yield from _gauges(tiers)
        yield from _counters(tiers)
        yield from _counters_by_reason(tiers)
        yield self._tenants(list(stats.values()))

    def _tenants(self, stats: list[tuple[str, CacheStats]]) -> Metric:
        """A device's and DRAM's bytes are each replica's own, hence their sum; Redis is one for all
        replicas of a model, of which each counts the whole as it last saw it, hence the largest."""
        own = {
            (tenant, tier): 0 for tenant in (*self._tenant_of_tag.values(), OTHERS) for tier in Tier
        }
        in_redis: dict[tuple[str, str], int] = {}
        for model, cache in stats:
            seen: dict[str, int] = {}
            for share in cache.tenants:
                tenant = self._tenant_of_tag.get(share.tenant, OTHERS)
                own[tenant, Tier.DEVICE] += share.device * _block_bytes(cache, Tier.DEVICE)
                own[tenant, Tier.DRAM] += share.dram * _block_bytes(cache, Tier.DRAM)
                block_bytes = _block_bytes(cache, Tier.REDIS)
                seen[tenant] = seen.get(tenant, 0) + share.redis * block_bytes
            for tenant, size in seen.items():
                in_redis[tenant, model] = max(size, in_redis.get((tenant, model), 0))
        for (tenant, _), size in in_redis.items():
            own[tenant, Tier.REDIS] += size
        family = GaugeMetricFamily(
            "forebay_tenant_cache_bytes",
            "KV of each tenant in each tier; approximate in Redis.",
            labels=("tenant", "tier"),
        )
        for labels, size in own.items():
            family.add_metric(labels, size)
        return family


def _gauges(tiers: list[tuple[str, TierStats]]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "forebay_cache_blocks", "Blocks of each tier by state.", labels=(*_BY_TIER, "state")
    )
    used = GaugeMetricFamily(
        "forebay_cache_bytes", "Bytes that hold KV in each tier.", labels=_BY_TIER
    )
    up = GaugeMetricFamily(
        "forebay_cache_tier_up", "0 while a tier does not answer.", labels=_BY_TIER
    )
    for replica, tier in tiers:
        at = (replica, tier.tier)
        if tier.total:
            blocks.add_metric((*at, "free"), tier.free)
            blocks.add_metric((*at, "cached"), tier.cached)
            blocks.add_metric((*at, "held"), tier.held)
        used.add_metric(at, tier.used_bytes)
        up.add_metric(at, float(tier.up))
    yield from (blocks, used, up)


_COUNTERS: tuple[tuple[str, str, Callable[[TierStats], float]], ...] = (
    ("hits", "Blocks of prompts that were taken from each tier.", lambda tier: tier.hits),
    ("loads", "Blocks that left a tier upwards.", lambda tier: tier.loads),
    ("load_seconds", "Time that loads from a tier took.", lambda tier: tier.load_s),
    (
        "saved_seconds",
        "Computing that a tier's hits saved, as predicted.",
        lambda tier: tier.saved_s,
    ),
    ("stores", "Blocks that came into a tier.", lambda tier: tier.stores),
    ("evictions", "Blocks pushed out of a tier.", lambda tier: tier.evictions),
)


def _counters(tiers: list[tuple[str, TierStats]]) -> Iterator[Metric]:
    for name, text, read in _COUNTERS:
        family = CounterMetricFamily(f"forebay_cache_{name}", text, labels=_BY_TIER)
        for replica, tier in tiers:
            family.add_metric((replica, tier.tier), read(tier))
        yield family


def _counters_by_reason(tiers: list[tuple[str, TierStats]]) -> Iterator[Metric]:
    """Every reason has a series from the start: a counter that exists can be alerted on."""
    labels = (*_BY_TIER, "reason")
    misses = CounterMetricFamily(
        "forebay_cache_misses", "Blocks of prompts that a tier did not give.", labels=labels
    )
    drops = CounterMetricFamily(
        "forebay_cache_store_drops", "Blocks that a tier did not take.", labels=labels
    )
    for replica, tier in tiers:
        for reason, count in _by_reason(tier.misses, tuple(Miss)).items():
            misses.add_metric((replica, tier.tier, reason), count)
        for reason, count in _by_reason(tier.dropped, DROPS).items():
            drops.add_metric((replica, tier.tier, reason), count)
    yield from (misses, drops)


def _by_reason(counts: Mapping[str, int], reasons: tuple[str, ...]) -> dict[str, int]:
    """The counts under a fixed set of reasons, the rest together under "other"."""
    known = {str(reason): counts.get(reason, 0) for reason in reasons}
    known[OTHERS] = sum(counts.values()) - sum(known.values())
    return known


def _block_bytes(cache: CacheStats, tier: Tier) -> int:
    """Of one block; a tier that has no places of its own holds what the one above it holds."""
    sizes = {each.tier: each.total_bytes // each.total for each in cache.tiers if each.total}
    size = sizes.get(tier)
    return size if size is not None else sizes.get(Tier.DRAM, sizes.get(Tier.DEVICE, 0))
