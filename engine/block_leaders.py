"""Who computes which block, so that others wait for it instead of computing it too."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from cache.block import BlockKey
from engine.sequence import Sequence


class BlockLeaders:
    """The blocks that running and loading sequences have not filled yet, by link. A block has one
    leader: who was first. Step-loop thread only."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, Sequence] = {}
        self._urged: list[tuple[Sequence, int]] = []

    def __len__(self) -> int:
        return len(self._leaders)

    def lead(self, sequence: Sequence, keys: Ordered[BlockKey]) -> None:
        """The sequence is going to fill these blocks, unless another one already is."""
        for key in keys:
            self._leaders.setdefault(key.link, sequence)

    def filled(self, key: BlockKey) -> None:
        """Nobody has to wait for this block any more."""
        self._leaders.pop(key.link, None)

    def leave(self, sequence: Sequence, keys: Ordered[BlockKey]) -> None:
        """The sequence runs no longer; those of `keys` that it led have no leader now."""
        for key in keys:
            if self._leaders.get(key.link) is sequence:
                del self._leaders[key.link]

    def reach(self, keys: Ordered[BlockKey], hits: int) -> int:
        """How many of the first of `keys` need not be computed by who waits for them: `hits` that
        are there, and those that are being filled behind them."""
        while hits < len(keys) and keys[hits].link in self._leaders:
            hits += 1
        return hits

    def keeps_waiting(self, sequence: Sequence, keys: Ordered[BlockKey], hits: int) -> bool:
        """Whether the first block behind `hits` is being filled: waiting for it beats computing it
        too. A leader that is less urgent than the sequence is urged on."""
        leader = self._leaders.get(keys[hits].link) if hits < len(keys) else None
        if leader is None:
            return False
        if leader.rank.priority > sequence.rank.priority:
            self._urged.append((leader, sequence.rank.priority))
        return True

    def take_urged(self) -> dict[Sequence, int]:
        """The leaders that somebody more urgent waits for, each with the most urgent priority that
        does."""
        urged: dict[Sequence, int] = {}
        for leader, priority in self._urged:
            urged[leader] = min(priority, urged.get(leader, leader.rank.priority))
        self._urged.clear()
        return urged
