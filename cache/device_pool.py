"""Device pages: who holds which, which hold reusable KV, which goes next.

Bookkeeping only; the bytes lie in the executor's `pages` tensor under the same indices. A page is

- free: nothing of value in it;
- held: at least one sequence's block table points at it;
- cached: held by nobody, but published under a hash and waiting, in eviction order, to be used
  again or to be taken for something else.

A published page keeps its hash when its last holder leaves, and loses it only when it is handed out
for other content. Pages come back in reverse block order, so that leaves are evicted before the
prefixes they extend. Not thread-safe: the step loop owns it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cache.block import BlockKey


class PoolExhausted(Exception):
    """Fewer pages can be had than were asked for; nothing was taken."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Pages by state; `free + cached + held == total` always."""

    free: int
    cached: int
    held: int
    total: int


class DevicePool:
    """`blocks` pages, numbered from 0."""

    def __init__(self, blocks: int) -> None:
        if blocks <= 0:
            raise ValueError(f"a pool needs at least one block, not {blocks}")
        self._holders = [0] * blocks
        self._key: list[BlockKey | None] = [None] * blocks
        self._page_of: dict[bytes, int] = {}
        self._free = list(range(blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # next victim first

    def available(self) -> int:
        """How many pages `take` could hand out now."""
        return len(self._free) + len(self._evictable)

    def take(self, count: int) -> list[int]:
        """`count` pages for new content, held once each; evicts cached ones when none are free.

        Raises PoolExhausted, and takes nothing, when there are not enough.
        """
        if count > self.available():
            raise PoolExhausted(f"{count} pages wanted, {self.available()} available")
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._holders[page] = 1
            pages.append(page)
        return pages

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """The pages of the longest published prefix of `keys`. Holds nothing."""
        pages = []
        for key in keys:
            page = self._page_of.get(key.link)
            if page is None or self._key[page] != key:
                break
            pages.append(page)
        return pages

    def evictable_among(self, pages: Sequence[int]) -> int:
        """How many of `pages` count as available now and will not once they are held."""
        return sum(self._holders[page] == 0 for page in pages)

    def hold(self, pages: Sequence[int]) -> None:
        """One more holder for each of `pages`, which must be held or cached."""
        for page in pages:
            if self._holders[page] == 0:
                del self._evictable[page]
            self._holders[page] += 1

    def publish(self, page: int, key: BlockKey) -> None:
        """Say that a held page now holds this full block, for others to find.

        If another page is published under the same hash already, that one stays the answer and
        this page remains its holder's own.
        """
        if self._holders[page] == 0:
            raise ValueError(f"page {page} is not held")
        if self._key[page] is None and key.link not in self._page_of:
            self._key[page] = key
            self._page_of[key.link] = page

    def release(self, pages: Sequence[int]) -> None:
        """One holder fewer for each of `pages`, given in block order."""
        for page in reversed(pages):
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is not held")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._key[page] is None:
                    self._free.append(page)
                else:
                    self._evictable[page] = None

    def counts(self) -> PoolCounts:
        """Pages by state."""
        total = len(self._holders)
        free, cached = len(self._free), len(self._evictable)
        return PoolCounts(free=free, cached=cached, held=total - free - cached, total=total)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is in exactly one state and every hash agrees."""
        free, cached = set(self._free), set(self._evictable)
        held = {page for page, holders in enumerate(self._holders) if holders > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, "a page is free and cached"
        assert not held & (free | cached), "a held page is on offer"
        assert len(free) + len(cached) + len(held) == len(self._holders), "a page is nowhere"
        assert all(self._key[page] is None for page in free), "a free page kept its hash"
        assert all(self._key[page] is not None for page in cached), "a cached page has no hash"
        published = {key.link: page for page, key in enumerate(self._key) if key is not None}
        assert published == self._page_of, "the hash index and the pages disagree"

    def _evict(self) -> int:
        page, _ = self._evictable.popitem(last=False)
        key = self._key[page]
        assert key is not None
        del self._page_of[key.link]
        self._key[page] = None
        return page
