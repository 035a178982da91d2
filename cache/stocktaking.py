"""What every tier of one engine holds and has done, and who has how much of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from cache.block import NOBODY, Tier
from cache.block_pool import BlockPool
from cache.report import CacheStats, TenantShare, TierStats
from cache.tiers import Tiers


def take_stock(tiers: Tiers) -> CacheStats:
    """As of now. Any thread."""
    dram, redis = tiers.dram, tiers.redis
    parts = [_pool_stats(tiers, Tier.DEVICE, tiers.device)]
    in_device = dict(tiers.device.tenant_blocks())
    in_dram: Mapping[bytes, int] = {}
    in_redis: Mapping[bytes, int] = {}
    if dram is not None and dram.keeps:
        parts.append(_pool_stats(tiers, Tier.DRAM, dram.pool))
        in_dram = dict(dram.pool.tenant_blocks())
    if redis is not None:
        own, wire = tiers.counters[Tier.REDIS], redis.stats()
        parts.append(
            TierStats(
                tier=Tier.REDIS,
                used_bytes=sum(wire.census_bytes.values()),
                hits=own.hits,
                loads=own.loads,
                load_s=own.load_s,
                saved_s=own.saved_s,
                stores=own.stores,
                dropped=Counter(own.dropped) + Counter(wire.dropped),
                misses=dict(own.misses),
                up=redis.up,
            )
        )
        in_redis = {
            tenant: size // redis.envelope.value_bytes for tenant, size in wire.census_bytes.items()
        }
    tenants = {*in_device, *in_dram, *in_redis} - {NOBODY.tenant}
    return CacheStats(
        tiers=tuple(parts),
        tenants=tuple(
            TenantShare(
                tenant, in_device.get(tenant, 0), in_dram.get(tenant, 0), in_redis.get(tenant, 0)
            )
            for tenant in sorted(tenants)
        ),
    )


def _pool_stats(tiers: Tiers, tier: Tier, pool: BlockPool) -> TierStats:
    counts, own = pool.counts(), tiers.counters[tier]
    return TierStats(
        tier=tier,
        free=counts.free,
        cached=counts.cached,
        held=counts.held,
        total=counts.total,
        used_bytes=(counts.cached + counts.held) * tiers.block_bytes,
        total_bytes=counts.total * tiers.block_bytes,
        hits=own.hits,
        loads=own.loads,
        load_s=own.load_s,
        saved_s=own.saved_s,
        stores=own.stores,
        evictions=pool.evictions,
        dropped=dict(own.dropped),
        misses=dict(own.misses),
    )
