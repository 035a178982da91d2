"""What one tenant has in a pool: its blocks, the tree they form, and the order they go in.

A prefix chain never crosses tenants (every tenant has its own root), so each tenant's blocks are
trees of their own. A block is *pinned* while it, or a block below it, is held: then it cannot go,
since leaves go first. Pins are counted along the chain. Holding a prefix from its root costs O(1) a
block; holding a block alone walks up to the next pinned one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cache.block import BlockKey
from cache.lazy_heap import LazyHeap
from policies.eviction import blocks_to_give


@dataclass(frozen=True, slots=True)
class Share:
    """Bounds in blocks. `floor`: below so many published ones, held or not, a tenant gives none to
    others. `quota`: so many may wait unheld; None is no bound."""

    floor: int = 0
    quota: int | None = None

    def __post_init__(self) -> None:
        if self.floor < 0:
            raise ValueError(f"floor must not be negative, is {self.floor}")
        if self.quota is not None and self.quota < 0:
            raise ValueError(f"quota must not be negative, is {self.quota}")


class Place:
    """A position in a tenant's tree. It outlives its block while children are there, and comes
    before it where children arrive first."""

    __slots__ = ("block", "children", "link", "pins")

    def __init__(self, link: bytes) -> None:
        self.link = link
        self.block: Block | None = None
        self.children = 0
        """Published blocks whose parent is this link."""
        self.pins = 0
        """Those of them that are pinned."""


class Block:
    """A published block: where it lies and what it is worth."""

    __slots__ = (
        "above",
        "held",
        "hits",
        "index",
        "keep_until_s",
        "key",
        "place",
        "priority",
        "saving_s",
        "tenant",
        "turn",
        "used",
    )

    def __init__(self, index: int, key: BlockKey, tenant: Tenant) -> None:
        self.index = index
        self.key = key
        self.tenant = tenant
        self.place = tenant.place(key.link)
        self.above = tenant.place(key.parent)
        self.held = True
        self.saving_s = 0.0
        self.hits = 0
        self.keep_until_s = 0.0
        self.priority = 0.0  # as of the last use, on the tenant's clock
        self.turn = 0
        self.used = False
        """Whether a holder that has left used it: then the last one's leaving counts as a use."""

    @property
    def pinned(self) -> bool:
        """Whether it or a block below it is held."""
        return self.held or self.place.pins > 0


class Tenant:
    """One tenant's blocks. `leaves` holds the cached blocks that have no published child, which are
    the ones that can go now, as `(order, index)`."""

    __slots__ = (
        "blocked",
        "blocks",
        "cached",
        "giving",
        "kept",
        "lead",
        "leaves",
        "places",
        "share",
        "tag",
    )

    def __init__(self, tag: bytes, share: Share) -> None:
        self.tag = tag
        self.share = share
        self.blocks: dict[int, Block] = {}
        self.places: dict[bytes, Place] = {}
        self.leaves: LazyHeap[Block] = LazyHeap()
        self.kept: LazyHeap[Block] = LazyHeap()
        """Published blocks that are kept, by when that ends, the deepest of equals first."""
        self.cached = 0
        self.blocked = 0
        """Cached blocks that cannot go because a block below them is held."""
        self.giving = 0
        """What the pool last counted of `blocks_to_give`."""
        self.lead = 0.0
        """How far evictions for the tenant's own quota moved its clock ahead of the pool's."""

    @property
    def evictable(self) -> int:
        """Cached blocks that can go, in some order."""
        return self.cached - self.blocked

    def to_give(self) -> int:
        """How many blocks others can make it give now."""
        return blocks_to_give(len(self.blocks), self.evictable, self.share.floor)

    def first_leaf(self) -> Block:
        """The block that goes next of its own; there must be one that can go."""
        first = self.leaves.first()
        assert first is not None
        return first[3]

    def place(self, link: bytes) -> Place:
        """The position of this link, made if need be."""
        place = self.places.get(link)
        if place is None:
            place = self.places[link] = Place(link)
        return place

    def attach(self, block: Block) -> None:
        """Put a held block into the tree."""
        self.blocks[block.index] = block
        block.place.block = block
        block.above.children += 1
        parent = block.above.block
        if parent is not None:
            self.leaves.remove(parent)
        self._pin(block.above)

    def detach(self, block: Block) -> Block | None:
        """Take a block out of the tree. Returns its parent if that is a cached leaf now."""
        above = block.above
        if not block.held:
            self.cached -= 1
            self.blocked -= block.place.pins > 0
        self.leaves.remove(block)
        if block.pinned:
            self._unpin(above)
        del self.blocks[block.index]
        block.place.block = None
        above.children -= 1
        self._forget_empty(block.place)
        if above.children:
            return None
        self._forget_empty(above)
        parent = above.block
        return parent if parent is not None and not parent.held else None

    def set_held(self, block: Block, held: bool) -> None:
        """A block got its first holder or lost its last one. A cached leaf is not yet in
        `leaves` after this."""
        if held:
            self.cached -= 1
            self.blocked -= block.place.pins > 0
            self.leaves.remove(block)
            block.held = True
            if not block.place.pins:
                self._pin(block.above)
        else:
            self.cached += 1
            self.blocked += block.place.pins > 0
            block.held = False
            if not block.place.pins:
                self._unpin(block.above)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree and its counts agree with the blocks."""
        cached = [block for block in self.blocks.values() if not block.held]
        assert len(cached) == self.cached, "a tenant's cached blocks are miscounted"
        assert sum(block.pinned for block in cached) == self.blocked, "pins are miscounted"
        leaves = {block for block in cached if not block.place.children}
        lined_up = {entry[3] for entry in self.leaves.ascending()}
        assert leaves == lined_up, "those in line are not the leaves"
        children: Counter[bytes] = Counter()
        pins: Counter[bytes] = Counter()
        for block in self.blocks.values():
            children[block.key.parent] += 1
            pins[block.key.parent] += block.pinned
            assert block.place.block is block, "a block is not in its place"
        for link, place in self.places.items():
            assert place.children == children[link], "a place's children are miscounted"
            assert place.pins == pins[link], "a place's pins are miscounted"
            assert place.children or place.block is not None, "an empty place was not forgotten"

    def _pin(self, place: Place) -> None:
        while True:
            place.pins += 1
            block = place.block
            if place.pins > 1 or block is None or block.held:
                return
            self.blocked += 1
            place = block.above

    def _unpin(self, place: Place) -> None:
        while True:
            place.pins -= 1
            block = place.block
            if place.pins or block is None or block.held:
                return
            self.blocked -= 1
            place = block.above

    def _forget_empty(self, place: Place) -> None:
        if place.block is None and not place.children:
            del self.places[place.link]
