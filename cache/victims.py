"""Which blocks of a pool will be evicted next, without evicting them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush

from cache.pool_tenant import Block, Place, Tenant
from policies.eviction import EvictionOrder, eviction_order, on_pool_clock


def foresee_victims(giving: Mapping[Tenant, int], count: int, now_s: float) -> list[int]:
    """The indices of the next `count` victims at `now_s`, in order, fewer if there are fewer.

    `giving` says how many blocks each tenant would lose at most. Blocks whose last child goes join
    the order, as they do when it really goes.
    """
    victims: list[int] = []
    left = dict(giving)
    children_gone: dict[Place, int] = {}  # by their parent's place
    leaves: dict[Tenant, Iterator[tuple[float, float, int, Block]]] = {}
    near: list[tuple[EvictionOrder, Block, bool]] = []

    def next_leaf(tenant: Tenant) -> list[tuple[EvictionOrder, Block, bool]]:
        entry = next(leaves[tenant], None)
        if entry is None:
            return []
        return [(on_pool_clock(entry[:3], tenant.lead), entry[3], True)]

    for tenant, limit in giving.items():
        if limit:
            leaves[tenant] = tenant.leaves.ascending()
            near += next_leaf(tenant)
    heapify(near)
    while near and len(victims) < count:
        _, block, was_leaf = heappop(near)
        tenant = block.tenant
        if not left[tenant]:
            continue
        left[tenant] -= 1
        victims.append(block.index)
        if was_leaf:
            for candidate in next_leaf(tenant):
                heappush(near, candidate)
        place = block.above
        gone = children_gone[place] = children_gone.get(place, 0) + 1
        parent = place.block
        if gone == place.children and parent is not None and not parent.held:
            order = eviction_order(parent.priority, parent.keep_until_s, now_s, parent.turn)
            heappush(near, (on_pool_clock(order, tenant.lead), parent, False))
    return victims
