"""Which block goes next: the least valuable first, kept ones last, floors and quotas respected.

The value is GreedyDual-Size-Frequency (Cherkasova, "Improving WWW proxies performance with
Greedy-Dual-Size-Frequency caching policy", HP Labs HPL-98-69, 1998): priority = clock + hits x cost
/ size, where the clock is the priority of the last victim. Blocks of one pool have one size, so
that it is left out; the cost is the time that a hit saves. A block that is not asked for again
keeps its priority while the clock rises past it: so age counts, and no clock is read.
"""

from __future__ import annotations

import math

EvictionOrder = tuple[float, float, int]
"""Retention, priority, turn; the smallest goes first."""


def eviction_priority(clock: float, saving_s: float, hits: int) -> float:
    """What a block is worth keeping for when it is used at `clock`.

    `saving_s` is what a hit saves. The use that computed the block counts like a hit.
    """
    return clock + (1 + hits) * saving_s


def advance_clock(clock: float, victim_priority: float) -> float:
    """The clock after an eviction. It never goes back: a victim may rank below the clock when it
    was held or protected for long."""
    return max(clock, victim_priority)


def eviction_order(priority: float, keep_until_s: float, now_s: float, turn: int) -> EvictionOrder:
    """Where a block stands in line.

    Blocks kept beyond `now_s` stand behind all others, the first to expire in front. Equal
    priorities go by `turn`, which counts uses: least recently used first.
    """
    return (keep_until_s if keep_until_s > now_s else -math.inf, priority, turn)


def on_pool_clock(order: EvictionOrder, lead: float) -> EvictionOrder:
    """A place in a tenant's line as a place in the pool's, where the tenant's clock is `lead` ahead
    of the pool's."""
    return (order[0], order[1] - lead, order[2])


def blocks_to_give(published: int, evictable: int, floor: int) -> int:
    """How many of its `evictable` blocks a tenant can be made to give to others: what it has
    `published`, held or not, never falls below its `floor` that way."""
    return max(0, min(evictable, published - floor))


def blocks_over_quota(cached: int, quota: int | None) -> int:
    """How many cached blocks a tenant has to give up at once. None is no quota."""
    return 0 if quota is None else max(0, cached - quota)


def most_kept(blocks: int) -> int:
    """How many of a pool's blocks may be kept at a time: the other half is for whoever asks for
    nothing special, which would find no room beside a tenant that keeps everything."""
    return blocks // 2
