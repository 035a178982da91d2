"""Blocks of one tier: who holds which, which hold reusable KV, which goes next.

Bookkeeping only, of device pages and of DRAM slots alike; the bytes lie elsewhere under the same
indices. A block is

- free: nothing of value in it;
- held: a block table or a transfer points at it;
- cached: held by nobody, but published under a hash and waiting, in eviction order, to be used
  again or to be taken for something else.

A published block keeps its hash when its last holder leaves, and loses it when it is evicted for
other content, dropped, or pushed out by its tenant's quota. The order is that of
`policies.eviction`, leaves first: a block goes after every published block that extends it. Not
thread-safe: the step loop owns it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cache.block import NOBODY, BlockKey
from cache.eviction_line import EvictionLine
from cache.journal import TierChanges
from cache.pool_tenant import Block, Share, Tenant

__all__ = ["BlockPool", "PoolCounts", "PoolExhausted", "Share"]


class PoolExhausted(Exception):
    """Fewer blocks can be had than were asked for; nothing was taken."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks by state; `free + cached + held == total` always."""

    free: int
    cached: int
    held: int
    total: int


class BlockPool:
    """`blocks` of them, numbered from 0. Tenants are the tags of `cache.block.Owner`.

    `on_evict(index, key)` is told of every block that loses its content to a `take` or a quota,
    while `key_of`, `hits_of` and `keep_until_of` still answer for it; it must not change the pool.
    `changes` is told of every block that comes to be found here, and of every one that is not any
    more.
    `keep_at_most` blocks can be kept at a time, None is all: beyond it whoever keeps most gives up
    what of it would expire first.
    """

    def __init__(
        self,
        blocks: int,
        *,
        keep_at_most: int | None = None,
        on_evict: Callable[[int, BlockKey], None] | None = None,
    ) -> None:
        if blocks <= 0:
            raise ValueError(f"a pool needs at least one block, not {blocks}")
        self.evictions = 0
        self.on_evict = on_evict
        self.changes: TierChanges | None = None
        self._holders = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._published: list[Block | None] = [None] * blocks
        self._by_link: dict[bytes, Block] = {}
        self._cached = 0
        self._line = EvictionLine(self._lose, blocks if keep_at_most is None else keep_at_most)

    def set_shares(self, shares: Mapping[bytes, Share]) -> None:
        """Every tenant's bounds from now on; those not named have none.

        Floors that add up to the pool's size leave nothing for others: see to it that they do not.
        Raises ValueError for a floor of NOBODY's, whose blocks anybody may push out.
        """
        nobody = shares.get(NOBODY.tenant)
        if nobody is not None and nobody.floor:
            raise ValueError("blocks shared with every tenant have no floor")
        self._line.set_shares(shares)

    def set_time(self, now_s: float) -> None:
        """Tell the time, on any clock that does not go back; kept blocks expire by it."""
        self._line.set_time(now_s)

    def may_stay(self, tenant: bytes) -> bool:
        """Whether any block of this tenant can stay when nobody holds it: its quota is not 0."""
        own = self._line.tenants.get(tenant)
        return own is None or own.share.quota != 0

    def available(self, tenant: bytes = NOBODY.tenant) -> int:
        """How many blocks `take` could hand out now to this tenant."""
        own = self._line.tenants.get(tenant)
        spared = 0 if own is None else own.evictable - own.giving
        return len(self._free) + self._line.giving + spared

    def take(self, count: int, tenant: bytes = NOBODY.tenant) -> list[int]:
        """`count` blocks for new content, held once each; evicts cached ones when none are free.

        No other tenant falls below its floor. Raises PoolExhausted, and takes nothing, when there
        are not enough.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, is {count}")
        if count > self.available(tenant):
            raise PoolExhausted(f"{count} blocks wanted, {self.available(tenant)} available")
        self._line.evict(count - len(self._free), self._line.tenants.get(tenant))
        taken = [self._free.pop() for _ in range(count)]
        for index in taken:
            self._holders[index] = 1
        return taken

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks of the longest published prefix of `keys`. Holds nothing."""
        found = []
        by_link = self._by_link
        for key in keys:
            block = by_link.get(key.link)
            if block is None or block.key != key:
                break
            found.append(block.index)
        return found

    def find(self, key: BlockKey) -> int | None:
        """The block published under this name with these tokens, parent and owner."""
        block = self._by_link.get(key.link)
        return block.index if block is not None and block.key == key else None

    def evictable_among(self, indices: Iterable[int]) -> int:
        """How many of `indices` nobody holds: they may count as available now, and will not once
        they are held."""
        return sum(self._holders[index] == 0 for index in indices)

    def hold(self, indices: Sequence[int]) -> None:
        """One more holder for each of `indices`, which must be held or cached."""
        for index in indices:
            if self._holders[index] == 0 and self._published[index] is None:
                raise ValueError(f"block {index} is neither held nor cached")
        touched: dict[bytes, Tenant] = {}
        for index in indices:
            self._holders[index] += 1
            block = self._published[index]
            if block is not None and not block.held:
                block.tenant.set_held(block, True)
                self._cached -= 1
                touched[block.tenant.tag] = block.tenant
        for tenant in touched.values():
            self._line.offer(tenant)

    def release(self, indices: Sequence[int], *, used: bool = True) -> None:
        """One holder fewer for each of `indices`, given in block order.

        Holding them was a use, which lasts until nobody holds them, unless `used` is False: moving
        a block to another tier is no reason to keep it.
        """
        touched: dict[bytes, Tenant] = {}
        for index in reversed(indices):
            holders = self._holders[index] - 1
            if holders < 0:
                raise ValueError(f"block {index} is not held")
            self._holders[index] = holders
            block = self._published[index]
            if block is not None:
                block.used = block.used or used
            if holders:
                continue
            if block is None:
                self._free.append(index)
                continue
            tenant = block.tenant
            tenant.set_held(block, False)
            self._cached += 1
            if block.used:
                self._line.note_use(block)
                block.used = False
            if not block.place.children:
                self._line.line_up(block)
            touched[tenant.tag] = tenant
        for tenant in touched.values():
            self._line.settle(tenant)

    def touch(self, indices: Iterable[int]) -> None:
        """One more hit for each of `indices` that is published. To be called once per request."""
        touched: dict[bytes, Tenant] = {}
        for index in indices:
            block = self._published[index]
            if block is not None:
                block.hits += 1
                self._line.note_use(block)
                if block in block.tenant.leaves:
                    self._line.line_up(block)
                    touched[block.tenant.tag] = block.tenant
        for tenant in touched.values():
            self._line.offer(tenant)

    def keep(self, indices: Iterable[int], until_s: float) -> None:
        """Let each of `indices` that is published go after all others until then, at least, as far
        as `keep_at_most` allows."""
        for index in indices:
            block = self._published[index]
            if block is not None:
                self._raise_worth(block, block.hits, until_s)

    def publish(
        self,
        index: int,
        key: BlockKey,
        *,
        saving_s: float,
        hits: int = 0,
        keep_until_s: float = 0.0,
    ) -> bool:
        """Say that a held block now holds this content, for others to find.

        `saving_s` is what a hit on it saves. False if another index is published under the same
        link: that one stays the answer, with the larger of both hits and retentions, and `index`
        remains its holder's own.
        """
        if self._holders[index] == 0:
            raise ValueError(f"block {index} is not held")
        if key.link == key.parent:
            raise ValueError("a block cannot extend itself")
        if not 0.0 <= saving_s < math.inf:
            raise ValueError(f"saving_s must be finite and not negative, is {saving_s}")
        block = self._published[index]
        if block is not None and block.key != key:
            raise ValueError(f"block {index} is published under another name")
        if block is None and key.link not in self._by_link:
            block = Block(index, key, self._line.tenant(key.owner.tenant))
            block.saving_s, block.hits = saving_s, hits
            block.tenant.attach(block)
            self._line.note_use(block)
            self._published[index] = self._by_link[key.link] = block
            if self.changes is not None:
                self.changes.stored(key.link)
            self._line.offer(block.tenant)
        answer = self._by_link[key.link]
        if answer.key == key:
            answer.saving_s = saving_s
            self._raise_worth(answer, max(answer.hits, hits), keep_until_s)
        return answer is block

    def drop(self, index: int) -> None:
        """Unpublish: a cached block becomes free, a held one keeps its holders and is found no
        more. Without effect on what is not published."""
        block = self._published[index]
        if block is not None:
            self._unpublish(block)
            self._line.settle(block.tenant)

    def drop_owned(self, tenant: bytes, scope: bytes | None) -> list[tuple[int, BlockKey]]:
        """Unpublish all of an owner's blocks, in no order; `scope` None is every scope."""
        own = self._line.tenants.get(tenant)
        if own is None:
            return []
        dropped = [
            block
            for block in own.blocks.values()
            if scope is None or block.key.owner.scope == scope
        ]
        for block in dropped:
            self._unpublish(block)
        self._line.settle(own)
        return [(block.index, block.key) for block in dropped]

    def clear(self) -> list[tuple[int, BlockKey]]:
        """Unpublish everything."""
        return [dropped for tag in self._line.tenants for dropped in self.drop_owned(tag, None)]

    def links(self) -> Collection[bytes]:
        """Of all that is published, held or cached; a view."""
        return self._by_link.keys()

    def key_of(self, index: int) -> BlockKey | None:
        """What is published there."""
        block = self._published[index]
        return None if block is None else block.key

    def hits_of(self, index: int) -> int:
        """Hits on what is published there."""
        block = self._published[index]
        return 0 if block is None else block.hits

    def keep_until_of(self, index: int) -> float:
        """Until when what is published there goes after all others."""
        block = self._published[index]
        return 0.0 if block is None else block.keep_until_s

    def next_victims(self, count: int, now_s: float) -> list[int]:
        """The next `count` blocks, or as many as there are, that a `take` for NOBODY would evict,
        in order. Changes nothing but the time, which is `now_s` from here on."""
        self._line.set_time(now_s)
        return self._line.foresee(count, floors=True)

    def cached_in_order(self, now_s: float) -> list[int]:
        """Every cached block that no held one extends, as they would go if no tenant had a floor:
        the most valuable last. The time is `now_s` from here on."""
        self._line.set_time(now_s)
        return self._line.foresee(self._cached, floors=False)

    def counts(self) -> PoolCounts:
        """Blocks by state."""
        total, free = len(self._holders), len(self._free)
        return PoolCounts(
            free=free, cached=self._cached, held=total - free - self._cached, total=total
        )

    def tenant_blocks(self) -> Mapping[bytes, int]:
        """Published blocks, held or cached, by tenant; those with none are left out. Any thread."""
        # the list is made at once: meanwhile the owner may meet a new tenant
        tenants = list(self._line.tenants.items())
        return {tag: blocks for tag, own in tenants if (blocks := len(own.blocks))}

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in exactly one state and the books agree."""
        free = set(self._free)
        held = {index for index, holders in enumerate(self._holders) if holders}
        published = [block for block in self._published if block is not None]
        cached = {block.index for block in published if not block.held}
        assert len(free) == len(self._free), "a block is free twice"
        assert all(self._published[index] is None for index in free), "a free block kept its hash"
        assert not free & held, "a held block is free"
        assert not cached & held, "a held block is on offer"
        assert len(free) + len(cached) + len(held) == len(self._holders), "a block is nowhere"
        assert len(cached) == self._cached, "the cached blocks are miscounted"
        by_link = {block.key.link: block for block in published}
        assert by_link == self._by_link, "the hash index and the blocks disagree"
        owned = sum(len(tenant.blocks) for tenant in self._line.tenants.values())
        assert owned == len(published), "a published block is of no tenant, or of two"
        self._line.check_integrity()

    def _raise_worth(self, block: Block, hits: int, keep_until_s: float) -> None:
        block.hits = hits
        self._line.keep(block, keep_until_s)

    def _lose(self, leaf: Block) -> None:
        if self.on_evict is not None:
            self.on_evict(leaf.index, leaf.key)
        self.evictions += 1
        self._unpublish(leaf)

    def _unpublish(self, block: Block) -> None:
        self._line.remove(block)
        del self._by_link[block.key.link]
        if self.changes is not None:
            self.changes.removed(block.key.link)
        self._published[block.index] = None
        if not block.held:
            self._cached -= 1
            self._free.append(block.index)
