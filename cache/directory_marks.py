"""Blocks that are believed to be somewhere, though nobody will say when they are gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple

from cache.directory_table import BlockTable, Slot

_GENERATIONS = 4
_MOST_GENERATIONS = 8
"""More would be nearly empty: what was in them has been marked again since."""


class _Generation(NamedTuple):
    slot: Slot
    first_s: float
    """When its first block was marked."""


class AgingMarks:
    """What one holder is believed to hold: bounded in blocks, and in time since last marked.

    Marks are kept in generations, each a slot of the table; a block is in one of them, that in
    which it was last marked. The oldest generation is forgotten whole, which takes no time: a mark
    lives for three quarters of the lifetime at least and for all of it at most, and of a full
    memory about a quarter goes at once. All of one call is in one generation, so that a prompt's
    beginning never goes before its end.
    """

    def __init__(
        self,
        table: BlockTable,
        *,
        capacity_blocks: int,
        ttl_s: float,
        opened: Callable[[Slot], None],
        closed: Callable[[Slot], None],
    ) -> None:
        """`opened` and `closed` are told of each slot that begins or ceases to count.

        Raises ValueError unless capacity and lifetime are positive.
        """
        if capacity_blocks < 1 or not ttl_s > 0:
            raise ValueError(f"{capacity_blocks} blocks for {ttl_s} s are no memory")
        self.capacity_blocks = capacity_blocks
        self.bits = 0
        """Any of these at a block: it is marked."""
        self._table = table
        self._ttl_s = ttl_s
        self._opened = opened
        self._closed = closed
        self._generations: deque[_Generation] = deque()  # oldest first; the last one is written to

    @property
    def blocks(self) -> int:
        """How many are marked."""
        return sum(generation.slot.blocks_near for generation in self._generations)

    @property
    def due_s(self) -> float:
        """When something is forgotten next; infinity for never."""
        return self._generations[0].first_s + self._ttl_s if self._generations else inf

    def newest_bits(self, now_s: float) -> int:
        """A block with one of these needs no new mark now."""
        if not self._generations or self._is_old(self._generations[-1], now_s):
            return 0
        return self._generations[-1].slot.near

    def make_room(self, blocks: int, now_s: float) -> None:
        """Begin another generation if the newest is too old or too full to take so many."""
        self.expire(now_s)
        if self._generations:
            newest = self._generations[-1]
            held = newest.slot.blocks_near
            fits = held + blocks <= self.capacity_blocks // _GENERATIONS
            if (fits or not held) and not self._is_old(newest, now_s):
                return
        slot = self._table.open_slot()
        self._generations.append(_Generation(slot, now_s))
        self.bits |= slot.near
        self._opened(slot)

    def mark(self, links: Iterable[bytes]) -> None:
        """These are held, as of the last `make_room`, which was told of so many or more; no more
        than the capacity."""
        newest = self._generations[-1].slot
        self._table.rewrite(links, newest.near, self.bits & ~newest.near)
        while self.blocks > self.capacity_blocks or len(self._generations) > _MOST_GENERATIONS:
            self._forget_oldest()

    def expire(self, now_s: float) -> None:
        """Forget what has not been marked for too long."""
        while self.due_s <= now_s:
            self._forget_oldest()

    def clear(self) -> None:
        """Forget everything."""
        while self._generations:
            self._forget_oldest()

    def _is_old(self, generation: _Generation, now_s: float) -> bool:
        return now_s >= generation.first_s + self._ttl_s / _GENERATIONS

    def _forget_oldest(self) -> None:
        slot = self._generations.popleft().slot
        self.bits &= ~slot.near
        self._closed(slot)
        self._table.retire(slot)
