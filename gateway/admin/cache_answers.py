"""The operator's answers about the cache, as JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cache.block import NOBODY
from cache.hashing import owner_tags
from cache.report import CacheStats, Erased, TenantShare, TierStats
from gateway.served_model import ServedModel


def tenants_by_tag(secret: bytes, tenant_ids: Iterable[str]) -> dict[bytes, str]:
    """Whose each tag is. Tags of tenants that are no longer configured cannot be told."""
    return {owner_tags(secret, tenant_id, None).tenant: tenant_id for tenant_id in tenant_ids}


def stats_answer(model: ServedModel, names: Mapping[bytes, str]) -> dict[str, Any]:
    """The tiers of each of a model's replicas, and who has how many blocks in them."""
    answers = []
    for replica in model.replicas:
        stats = replica.cache_stats()
        answers.append(
            {
                "replica": replica.name,
                "tiers": [_tier(tier) for tier in stats.tiers],
                "owners": _owners(stats, names),
            }
        )
    return {"replicas": answers}


def erased_answer(erased: Erased, stats: Iterable[CacheStats]) -> dict[str, Any]:
    """Blocks removed by tier. A tier that is off is left out; one that could not be asked is null.

    `stats` says which tiers are on, for each replica.
    """
    counts = {"device": erased.device, "dram": erased.dram, "redis": erased.redis}
    present = {tier.tier.value for replica in stats for tier in replica.tiers}
    return {tier: blocks for tier, blocks in counts.items() if tier in present or blocks}


def _tier(tier: TierStats) -> dict[str, Any]:
    return {
        "tier": tier.tier.value,
        "up": tier.up,
        "blocks": {
            "free": tier.free,
            "cached": tier.cached,
            "held": tier.held,
            "total": tier.total,
        },
        "used_bytes": tier.used_bytes,
        "total_bytes": tier.total_bytes,
        "hits": tier.hits,
        "misses": _counts(tier.misses),
        "loads": tier.loads,
        "load_s": tier.load_s,
        "saved_s": tier.saved_s,
        "stores": tier.stores,
        "dropped": _counts(tier.dropped),
        "evictions": tier.evictions,
    }


def _counts(by_reason: Mapping[str, int]) -> dict[str, int]:
    """Reasons may be enumeration members, which JSON takes as keys only as plain text."""
    return {str(reason): count for reason, count in by_reason.items()}


def _owners(stats: CacheStats, names: Mapping[bytes, str]) -> list[dict[str, Any]]:
    """The largest first. What belongs to no configured tenant is one entry, and so is what the
    operator shares with all."""
    totals: dict[tuple[str, str | None], list[int]] = {}
    for share in stats.tenants:
        blocks = totals.setdefault(_owner(share, names), [0, 0, 0])
        for i, held in enumerate((share.device, share.dram, share.redis)):
            blocks[i] += held
    return [
        {"owner": kind, "tenant": tenant, "device": device, "dram": dram, "redis": redis}
        for (kind, tenant), (device, dram, redis) in sorted(
            totals.items(), key=lambda entry: -sum(entry[1])
        )
    ]


def _owner(share: TenantShare, names: Mapping[bytes, str]) -> tuple[str, str | None]:
    if share.tenant == NOBODY.tenant:
        return "shared", None
    tenant = names.get(share.tenant)
    return ("tenant", tenant) if tenant is not None else ("other", None)
