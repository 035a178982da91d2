"""Items in order, where an item's place changes often."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from policies.eviction import EvictionOrder

_Item = TypeVar("_Item", bound=Hashable)

_STALE_ALLOWED = 64


class LazyHeap(Generic[_Item]):
    """A priority queue whose entries are left behind when their item moves or goes, and dropped
    when they come up or outnumber the live ones. Every operation is O(log n) amortised.

    An entry is the item's order with the item behind it: flat, since comparing is most of the work.
    Two items must not have the same order; items themselves are never compared.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int, _Item]] = []
        self._live: dict[_Item, tuple[float, float, int, _Item]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: _Item) -> bool:
        return item in self._live

    def put(self, item: _Item, order: EvictionOrder) -> None:
        """Place the item, or move it."""
        entry = (*order, item)
        self._live[item] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._live) + _STALE_ALLOWED:
            self._shed_stale()

    def remove(self, item: _Item) -> None:
        """Take the item out, wherever it stands; without effect if it is not there."""
        removed = self._live.pop(item, None)
        if removed is not None and len(self._heap) > 2 * len(self._live) + _STALE_ALLOWED:
            self._shed_stale()

    def first(self) -> tuple[float, float, int, _Item] | None:
        """The entry with the smallest order."""
        heap, live = self._heap, self._live
        while heap:
            entry = heap[0]
            if live.get(entry[3]) is entry:
                return entry
            heappop(heap)
        return None

    def ascending(self) -> Iterator[tuple[float, float, int, _Item]]:
        """The entries in order, each found in O(log k) after k others. The heap must not change
        while this is read."""
        heap = self._heap
        near = [(heap[0], 0)] if heap else []
        while near:
            entry, position = heappop(near)
            for below in (2 * position + 1, 2 * position + 2):
                if below < len(heap):
                    heappush(near, (heap[below], below))
            if self._live.get(entry[3]) is entry:
                yield entry

    def _shed_stale(self) -> None:
        self._heap = list(self._live.values())
        heapify(self._heap)
