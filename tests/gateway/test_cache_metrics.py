"""The cache's metrics: what replicas say of their tiers and of whose KV is in them."""

from __future__ import annotations

import dataclasses

from cache.block import NOBODY, Tier
from cache.hashing import owner_tags
from cache.report import CacheStats, Miss, TenantShare, TierStats
from gateway.cache_metrics import DROPS
from gateway.metrics import Metrics

SECRET = b"server secret"
DEVICE = TierStats(
    Tier.DEVICE,
    free=5,
    cached=3,
    held=2,
    total=10,
    used_bytes=500,
    total_bytes=1000,
    hits=7,
    saved_s=1.5,
    stores=9,
    evictions=4,
    dropped={"quota": 2, "whim": 1},
    misses={Miss.NEVER_SEEN: 6, "odd": 3},
)
DRAM = TierStats(Tier.DRAM, free=8, total=8, total_bytes=960, loads=2, load_s=0.25)
REDIS = TierStats(Tier.REDIS, used_bytes=4321, misses={"late": 1}, up=False)


def tag(tenant: str) -> bytes:
    return owner_tags(SECRET, tenant, None).tenant


def stats(*shares: TenantShare) -> CacheStats:
    return CacheStats((DEVICE, DRAM, REDIS), shares)


def values(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs if "cache" in name}


def make() -> Metrics:
    return Metrics(models=["m"], tenants=["acme", "beta"], secret=SECRET)


def test_every_tier_is_read_when_scraped_and_only_then():
    metrics = make()
    asked = 0

    def read() -> CacheStats:
        nonlocal asked
        asked += 1
        return stats()

    metrics.watch_cache("m/0", "m", read)
    assert asked == 0
    seen = values(metrics)
    assert asked == 1

    def of(name: str, tier: str, **labels: str) -> float:
        more = "".join(f'{key}="{value}",' for key, value in sorted(labels.items()))
        at = f'reason="{labels["reason"]}",' if "reason" in labels else ""
        state = f'state="{labels["state"]}",' if "state" in labels else ""
        assert more == at + state
        return seen[f'forebay_cache_{name}{{{at}replica="m/0",{state}tier="{tier}"}}']

    assert of("blocks", "device", state="free") == 5
    assert of("blocks", "device", state="cached") == 3
    assert of("blocks", "device", state="held") == 2
    assert of("bytes", "device") == 500
    assert of("bytes", "redis") == 4321
    assert of("hits_total", "device") == 7
    assert of("saved_seconds_total", "device") == 1.5
    assert of("stores_total", "device") == 9
    assert of("evictions_total", "device") == 4
    assert of("loads_total", "dram") == 2
    assert of("load_seconds_total", "dram") == 0.25
    assert of("misses_total", "device", reason="never_seen") == 6
    assert of("misses_total", "redis", reason="late") == 1
    assert of("store_drops_total", "device", reason="quota") == 2
    assert of("tier_up", "device") == 1
    assert of("tier_up", "redis") == 0
    assert not [name for name in seen if "_blocks{" in name and 'tier="redis"' in name]


def test_reasons_are_a_fixed_set_from_the_start():
    metrics = make()
    metrics.watch_cache("m/0", "m", lambda: CacheStats((TierStats(Tier.DEVICE),), ()))
    before = set(values(metrics))
    for reason in (*Miss, *DROPS, "other"):
        assert [name for name in before if f'reason="{reason}"' in name]
    metrics.watch_cache("m/0", "m", lambda: CacheStats((DEVICE,), ()))
    after = values(metrics)
    assert {name for name in after if "reason=" in name} == {
        name for name in before if "reason=" in name
    }
    misses = sum(value for name, value in after.items() if "misses_total" in name)
    drops = sum(value for name, value in after.items() if "drops_total" in name)
    assert (misses, drops) == (9, 3)  # what no reason names is counted too


def test_each_tenants_bytes_are_summed_over_replicas_and_strangers_counted_together():
    metrics = make()
    mine = TenantShare(tag("acme"), device=2, dram=3, redis=4)
    strangers = (
        TenantShare(NOBODY.tenant, device=1, dram=0, redis=0),
        TenantShare(tag("removed"), device=1, dram=1, redis=1),
    )
    metrics.watch_cache("m/0", "m", lambda: stats(mine, *strangers))
    metrics.watch_cache("m/1", "m", lambda: stats(dataclasses.replace(mine, redis=5)))
    metrics.watch_cache("n/0", "n", lambda: stats(mine))
    seen = values(metrics)

    def of(tenant: str, tier: str) -> float:
        return seen[f'forebay_tenant_cache_bytes{{tenant="{tenant}",tier="{tier}"}}']

    assert of("acme", "device") == 3 * 2 * 100
    assert of("acme", "dram") == 3 * 3 * 120
    assert of("acme", "redis") == (5 + 4) * 120  # one Redis for both replicas of m
    assert of("beta", "device") == 0
    assert of("other", "device") == 200
    assert of("other", "redis") == 120
    assert tag("acme").hex() not in metrics.render().decode()


def test_a_tenant_that_a_reload_brings_gets_its_name():
    metrics = make()
    share = TenantShare(tag("late"), device=1, dram=0, redis=0)
    metrics.watch_cache("m/0", "m", lambda: stats(share))
    series = 'forebay_tenant_cache_bytes{tenant="late",tier="device"}'
    assert series not in values(metrics)
    metrics.set_tenants(["acme", "late"])
    assert values(metrics)[series] == 100
