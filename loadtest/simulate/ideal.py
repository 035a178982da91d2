"""How much of a trace one cache that holds everything would find."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.trace import Trace

_DENSE_IDS = 1 << 27
"""Ids below are remembered in a byte each; traces mostly number their blocks from 0."""


class IdealCache:
    """Everything that was ever asked for. `blocks` counts what prompts had, `found` what of that
    was there, with all that is before it."""

    def __init__(self) -> None:
        self.blocks = 0
        self.found = 0
        self._dense = bytearray()
        self._others: set[int] = set()

    @property
    def hit_rate(self) -> float:
        """Found blocks among all; 0.0 without blocks."""
        return self.found / self.blocks if self.blocks else 0.0

    def ask(self, blocks: Sequence[int]) -> None:
        """A prompt with these blocks comes, and is there from now on."""
        if not blocks:
            return
        self.blocks += len(blocks)
        if min(blocks) < 0 or (most := max(blocks)) >= _DENSE_IDS:
            self._ask_any(blocks)
            return
        self._make_dense(most)
        found, dense = 0, self._dense
        for block in blocks:
            if not dense[block]:
                break
            found += 1
        for block in blocks[found:]:
            dense[block] = 1
        self.found += found

    def _ask_any(self, blocks: Sequence[int]) -> None:
        whole = True
        for block in blocks:
            if 0 <= block < _DENSE_IDS:
                self._make_dense(block)
                here = self._dense[block] > 0
                self._dense[block] = 1
            else:
                here = block in self._others
                self._others.add(block)
            whole = whole and here
            self.found += whole

    def _make_dense(self, most: int) -> None:
        """Have a byte for each id up to `most`."""
        dense = self._dense
        if most >= len(dense):
            dense.extend(bytes(most + 1 - len(dense) + len(dense) // 8))


def ideal_hit_rate(trace: Trace) -> float:
    """The share of all prompts' blocks that an earlier prompt had, with all that was before them:
    no fleet can find more. 0.0 without blocks.

    Of the conversation trace of Mooncake it is 36.6 %.
    """
    cache = IdealCache()
    for request in trace.requests:
        cache.ask(request.blocks)
    return cache.hit_rate
