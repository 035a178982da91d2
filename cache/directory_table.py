"""Which blocks are known, and who holds each: one table from links to sets of holders.

A set of holders is an integer with two bits for each *slot*: near (the device, or wherever the
holder keeps blocks) and far (its DRAM). Equal sets are one object, so that a block costs its link
and its place in the table, whoever holds it.

A slot is a holder's place for as long as what it holds may be forgotten all together. Retiring one
takes no time, whatever it holds: its bits count for nothing from then on and are cleared bit by bit
by `sweep`, and in passing; when the last one has gone, the place is given to the next who asks.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

SHARDS = 256
"""By a link's first byte, so that no dictionary is large: growing or sweeping one is short."""
_MOST_SHARED_SETS = 1 << 16
_LINK_BYTES = 64
"""What the allocator takes for a bytes object of 16 bytes."""


class Slot:
    """A holder's two bits, and how many blocks have them."""

    __slots__ = ("blocks_far", "blocks_near", "far", "near", "position")

    def __init__(self, position: int) -> None:
        self.position = position
        self.near = 1 << (2 * position)
        self.far = self.near << 1
        self.blocks_near = 0
        self.blocks_far = 0


class BlockTable:
    """Not thread-safe. Links are bytes with at least one; that their first byte is evenly
    distributed makes it fast, not right."""

    def __init__(self, max_blocks: int) -> None:
        """Raises ValueError unless there is room for a block."""
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, not {max_blocks}")
        self.max_blocks = max_blocks
        self.blocks = 0
        self.refused = 0
        """How many times a block was not entered because the table was full."""
        self.shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self.every_near = 0
        """The near bits of all places there have been."""
        self._slots: list[Slot] = []
        self._vacant: list[int] = []  # positions, a heap: low ones first keep the integers short
        self._retired: set[int] = set()
        self._dead = 0  # the bits of retired slots
        self._shared: dict[int, int] = {}
        self._sweep_shard = SHARDS - 1
        self._sweep_links: list[bytes] = []
        self._sweep_from = 0

    @property
    def retired(self) -> int:
        """How many slots wait for their last bits to be cleared."""
        return len(self._retired)

    def open_slot(self) -> Slot:
        """A place that no block has bits of."""
        if self._vacant:
            slot = Slot(heapq.heappop(self._vacant))
            self._slots[slot.position] = slot
        else:
            slot = Slot(len(self._slots))
            self._slots.append(slot)
            self.every_near |= slot.near
        return slot

    def retire(self, slot: Slot) -> None:
        """Its holder holds nothing of this any more. Takes no longer for a million blocks than for
        none. Once per slot."""
        if slot.blocks_near or slot.blocks_far:
            self._retired.add(slot.position)
            self._dead |= slot.near | slot.far
        else:
            heapq.heappush(self._vacant, slot.position)

    def holders(self, link: bytes) -> int:
        """Everybody's bits at a block, those of retired slots among them; 0 if it is not known."""
        return self.shards[link[0]].get(link, 0)

    def rewrite(self, links: Iterable[bytes], add: int = 0, clear: int = 0) -> None:
        """Give each block the bits in `add` and take those in `clear` from it. What nobody holds is
        forgotten; what is not known is not entered when the table is full."""
        shards, shared = self.shards, self._shared
        clear |= self._dead
        before = run = 0  # `run` blocks in a row changed from `before` to `after`
        after = shared.setdefault(add, add) if add else 0
        known = self.blocks
        try:
            for link in links:
                shard = shards[link[0]]
                old = shard.get(link, 0)
                if old is not before:
                    if run:
                        self._count(before, after, run)
                        run = 0
                    before = old
                    after = old & ~clear | add
                    after = old if after == old else shared.setdefault(after, after)
                if after is before:
                    continue
                if not before:
                    if known >= self.max_blocks:
                        self.refused += 1
                        continue
                    known += 1
                run += 1
                if after:
                    shard[link] = after
                else:
                    del shard[link]
                    known -= 1
        finally:
            self.blocks = known
            if run:
                self._count(before, after, run)
        if len(shared) > _MOST_SHARED_SETS:
            shared.clear()  # equal sets are two objects for a while, which costs memory only

    def prefix_end(self, links: Sequence[bytes], bits: int, start: int = 0) -> int:
        """Where the run of blocks from `start` on that have any of these bits ends.

        Found by halving: right where the run is all that has them, else the end of some run.
        """
        shards = self.shards
        high = len(links)
        if start >= high or not self.holders(links[start]) & bits:
            return start
        if self.holders(links[high - 1]) & bits:
            return high
        low, high = start, high - 1  # low has them, high has not
        while high - low > 1:
            middle = (low + high) >> 1
            link = links[middle]
            if shards[link[0]].get(link, 0) & bits:
                low = middle
            else:
                high = middle
        return high

    def sweep(self, budget_blocks: int) -> int:
        """Clear bits of retired slots at about so many blocks, going on where the last call ended.
        Returns how many it looked at; 0 when there is nothing to clear."""
        looked_at = 0
        while self._dead and looked_at < budget_blocks:
            if self._sweep_from >= len(self._sweep_links):
                self._sweep_next_shard()
                looked_at += 1
            end = self._sweep_from + budget_blocks - looked_at
            part = self._sweep_links[self._sweep_from : end]
            self.rewrite(part)
            self._sweep_from += len(part)
            looked_at += len(part)
        if looked_at and not self._dead:
            self._compact(self._sweep_shard)
            self._sweep_links, self._sweep_from = [], 0
            self._shared.clear()
        return looked_at

    def bytes_estimate(self) -> int:
        """What all this takes."""
        return (
            sum(map(sys.getsizeof, self.shards))
            + self.blocks * _LINK_BYTES
            + sys.getsizeof(self._shared)
            + sys.getsizeof(self.every_near) * len(self._shared)
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every count is what the table holds. Looks at everything."""
        near = [0] * len(self._slots)
        far = [0] * len(self._slots)
        for bits, blocks in Counter(chain.from_iterable(map(dict.values, self.shards))).items():
            assert bits, "a block that nobody holds"
            for position, slot in enumerate(self._slots):
                near[position] += blocks if bits & slot.near else 0
                far[position] += blocks if bits & slot.far else 0
        assert near == [slot.blocks_near for slot in self._slots], "near counts are off"
        assert far == [slot.blocks_far for slot in self._slots], "far counts are off"
        assert self.blocks == sum(map(len, self.shards)), "the count of blocks is off"
        for position in self._vacant:
            assert near[position] + far[position] == 0, "a vacant place is in use"

    def _count(self, before: int, after: int, blocks: int) -> None:
        changed = before ^ after
        while changed:
            bit = changed & -changed
            changed ^= bit
            place = bit.bit_length() - 1
            slot = self._slots[place >> 1]
            by = blocks if after & bit else -blocks
            if place & 1:
                slot.blocks_far += by
            else:
                slot.blocks_near += by
            if by < 0 and not slot.blocks_near and not slot.blocks_far:
                self._vacate(slot)

    def _vacate(self, slot: Slot) -> None:
        if slot.position in self._retired:
            self._retired.discard(slot.position)
            self._dead &= ~(slot.near | slot.far)
            heapq.heappush(self._vacant, slot.position)

    def _sweep_next_shard(self) -> None:
        self._compact(self._sweep_shard)
        self._sweep_shard = (self._sweep_shard + 1) % SHARDS
        self._sweep_links = list(self.shards[self._sweep_shard])
        self._sweep_from = 0

    def _compact(self, index: int) -> None:
        """Give memory back: a dictionary does not shrink by itself."""
        shard = self.shards[index]
        if len(shard) < len(self._sweep_links) // 2:
            self.shards[index] = dict(shard)
