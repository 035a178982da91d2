"""What all replicas share in Redis: one key per block, the least recently used going first."""

from __future__ import annotations

from collections import OrderedDict


class RedisTier:
    """`blocks` at most. What is written or read is used."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self.evictions = 0
        self._used: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._used

    def __len__(self) -> int:
        return len(self._used)

    def store(self, block_id: int) -> None:
        """Write it, or note that it is there."""
        self._used[block_id] = None
        self._used.move_to_end(block_id)
        if len(self._used) > self.total:
            self._used.popitem(last=False)
            self.evictions += 1

    def read(self, block_id: int) -> None:
        """It is loaded, if it is there."""
        if block_id in self._used:
            self._used.move_to_end(block_id)
