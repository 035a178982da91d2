"""Whose block goes next: every tenant's blocks of one pool, in the order of `policies.eviction`.

Each tenant has a line of its own, and the tenants that can be made to give stand in a line by their
first leaf, so that finding a victim never searches. Time and use are told; no clock is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cache.lazy_heap import LazyHeap
from cache.pool_tenant import Block, Share, Tenant
from cache.victims import foresee_victims
from policies.eviction import (
    EvictionOrder,
    advance_clock,
    blocks_over_quota,
    eviction_order,
    eviction_priority,
    on_pool_clock,
)


class EvictionLine:
    """`lose(leaf)` is called for every victim and has to take it out with `remove`.

    Whoever changes a tenant's blocks calls `offer` for it afterwards, or `settle` if more of them
    may be cached than before.
    """

    def __init__(self, lose: Callable[[Block], None], keep_at_most: int) -> None:
        self.tenants: dict[bytes, Tenant] = {}
        self.giving = 0
        """How many blocks all tenants together can be made to give."""
        self._lose = lose
        self._givers: LazyHeap[Tenant] = LazyHeap()
        self._keep_at_most = keep_at_most
        self._kept: LazyHeap[Block] = LazyHeap()  # by when that ends
        self._keepers: LazyHeap[Tenant] = LazyHeap()  # who keeps most is first
        self._keeps = 0
        self._clock = 0.0
        self._now_s = 0.0
        self._turn = 0

    def tenant(self, tag: bytes) -> Tenant:
        """The tenant of this tag, new if need be."""
        tenant = self.tenants.get(tag)
        if tenant is None:
            tenant = self.tenants[tag] = Tenant(tag, Share())
        return tenant

    def set_shares(self, shares: Mapping[bytes, Share]) -> None:
        """Every tenant's bounds; those not named have none."""
        for tag in shares:
            self.tenant(tag)
        for tag, tenant in self.tenants.items():
            tenant.share = shares.get(tag, Share())
            self.settle(tenant)

    def set_time(self, now_s: float) -> None:
        """Kept blocks expire by it. A time before the last one told is not believed."""
        self._now_s = max(self._now_s, now_s)
        while (first := self._kept.first()) is not None and first[0] <= self._now_s:
            self._forget_kept(first[3])
            self._line_up_again(first[3])

    def keep(self, block: Block, until_s: float) -> None:
        """Let a published block go after all others until then, at least.

        Beyond `keep_at_most` in all, whoever keeps most loses what of it would expire first, the
        end of a prompt before its beginning: that may be this very block.
        """
        if until_s <= block.keep_until_s:
            return
        block.keep_until_s = until_s
        if until_s > self._now_s:
            self._keeps += 1
            self._kept.put(block, (until_s, 0.0, self._keeps))
            block.tenant.kept.put(block, (until_s, -block.key.start, self._keeps))
            self._count_kept(block.tenant)
        if len(self._kept) > self._keep_at_most and (most := self._keepers.first()) is not None:
            first = most[3].kept.first()
            assert first is not None
            first[3].keep_until_s = 0.0
            self._forget_kept(first[3])
            self._line_up_again(first[3])
        self._line_up_again(block)

    def note_use(self, block: Block) -> None:
        """Renew the block's priority and turn. One that is lined up has to be lined up again."""
        self._turn += 1
        block.turn = self._turn
        clock = self._clock + block.tenant.lead
        block.priority = eviction_priority(clock, block.saving_s, block.hits)

    def line_up(self, leaf: Block) -> None:
        """Put a cached leaf where it belongs now."""
        order = eviction_order(leaf.priority, leaf.keep_until_s, self._now_s, leaf.turn)
        leaf.tenant.leaves.put(leaf, order)

    def remove(self, block: Block) -> None:
        """Take a block out, wherever it stands; what it extends may become a leaf."""
        self._forget_kept(block)
        parent = block.tenant.detach(block)
        if parent is not None:
            self.line_up(parent)

    def offer(self, tenant: Tenant) -> None:
        """Bring up to date what others can take from the tenant, and which would go first."""
        giving = tenant.to_give()
        self.giving += giving - tenant.giving
        tenant.giving = giving
        first = tenant.leaves.first() if giving else None
        if first is None:
            self._givers.remove(tenant)
        else:
            self._givers.put(tenant, on_pool_clock(first[:3], tenant.lead))

    def settle(self, tenant: Tenant) -> None:
        """Enforce the quota, then offer what is left."""
        over = blocks_over_quota(tenant.cached, tenant.share.quota)
        try:
            for _ in range(min(over, tenant.evictable)):
                leaf = tenant.first_leaf()
                # its own clock only: a small quota's quick turnover must not age everybody's blocks
                ahead = advance_clock(self._clock + tenant.lead, leaf.priority)
                tenant.lead = ahead - self._clock
                self._lose(leaf)
        finally:
            self.offer(tenant)

    def evict(self, count: int, taker: Tenant | None) -> None:
        """Lose the next `count` blocks, for `taker`; there must be as many to be had."""
        while count > 0:
            tenant = self._next_to_give(taker)
            # A leaf's ancestors save less than it does, so that mostly they follow at once: go on
            # with this tenant until another's first leaf is due.
            self._givers.remove(tenant)
            rival = self._rival(tenant, taker)
            limit = min(count, tenant.giving or tenant.evictable)
            try:
                while limit:
                    leaf = tenant.first_leaf()
                    self._clock = advance_clock(self._clock, leaf.priority - tenant.lead)
                    self._lose(leaf)
                    count -= 1
                    limit -= 1
                    first = tenant.leaves.first()
                    if first is None or (
                        rival is not None and on_pool_clock(first[:3], tenant.lead) > rival
                    ):
                        break
            finally:
                self.offer(tenant)

    def foresee(self, count: int, *, floors: bool) -> list[int]:
        """The indices of the next `count` victims, with or without regard to floors."""
        giving = {
            tenant: tenant.giving if floors else tenant.evictable
            for tenant in self.tenants.values()
        }
        return foresee_victims(giving, count, self._now_s)

    def check_integrity(self) -> None:
        """Raise AssertionError unless what is remembered is what would be computed afresh."""
        for tenant in self.tenants.values():
            tenant.check_integrity()
            assert tenant.giving == tenant.to_give(), "what a tenant can give is out of date"
            over = blocks_over_quota(tenant.cached, tenant.share.quota)
            assert not over or not tenant.evictable, "a tenant is over its quota"
            assert (tenant in self._givers) == (tenant.giving > 0), "the givers are out of date"
            for entry in tenant.leaves.ascending():
                leaf = entry[3]
                due = eviction_order(leaf.priority, leaf.keep_until_s, self._now_s, leaf.turn)
                assert entry[:3] == due, "a block stands at the wrong place in line"
        giving = sum(tenant.giving for tenant in self.tenants.values())
        assert giving == self.giving, "what tenants can give is miscounted"
        kept = [
            block
            for tenant in self.tenants.values()
            for block in tenant.blocks.values()
            if block.keep_until_s > self._now_s
        ]
        assert all(block in self._kept and block in block.tenant.kept for block in kept), (
            "a kept block was forgotten"
        )
        counted = sum(len(tenant.kept) for tenant in self.tenants.values())
        assert len(kept) == len(self._kept) == counted, "kept blocks are miscounted"
        assert counted <= self._keep_at_most, "too many blocks are kept"

    def _line_up_again(self, block: Block) -> None:
        if block in block.tenant.leaves:
            self.line_up(block)
            self.offer(block.tenant)

    def _forget_kept(self, block: Block) -> None:
        if block in self._kept:
            self._kept.remove(block)
            block.tenant.kept.remove(block)
            self._count_kept(block.tenant)

    def _count_kept(self, tenant: Tenant) -> None:
        self._keepers.remove(tenant)
        if kept := len(tenant.kept):
            # of equals the one that has just come to it gives: it takes nothing from the others
            self._keeps += 1
            self._keepers.put(tenant, (-kept, 0.0, -self._keeps))

    def _next_to_give(self, taker: Tenant | None) -> Tenant:
        """Whose first leaf goes next: the taker itself gives whatever its floor."""
        offered = self._givers.first()
        own = self._spared_leaf(taker)
        if offered is None or (own is not None and own < offered[:3]):
            assert taker is not None
            return taker
        return offered[3]

    def _rival(self, tenant: Tenant, taker: Tenant | None) -> EvictionOrder | None:
        """Where the first leaf stands of those that could give instead of `tenant`, which has been
        taken out of the givers."""
        offered = self._givers.first()
        own = None if taker is tenant else self._spared_leaf(taker)
        if offered is None or (own is not None and own < offered[:3]):
            return own
        return offered[:3]

    def _spared_leaf(self, taker: Tenant | None) -> EvictionOrder | None:
        """Where the taker's first leaf stands if others could not take it: its floor spares it."""
        if taker is None or taker.giving or not taker.evictable:
            return None
        first = taker.leaves.first()
        assert first is not None
        return on_pool_clock(first[:3], taker.lead)
