"""Why each block of a prompt was a hit or a miss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from cache.block import BlockKey, Tier
from cache.promotion import Lookup
from cache.report import BlockRun, Miss
from cache.tiers import Tiers

_EXPLAINED_BLOCKS = 64
"""Behind the first missing block, reasons are sought for so many; the rest only follows a gap."""


def explain(
    tiers: Tiers,
    lookup: Lookup,
    keys: Sequence[BlockKey],
    origins: Sequence[Tier],
    prompt_tokens: int,
) -> tuple[tuple[BlockRun, ...], Mapping[Miss, int]]:
    """The runs of a prompt's blocks, and how many were missed for which reason.

    `origins` are where the leading blocks came from; every key behind them was missed. The tail
    that has no key holds the last token.
    """
    runs: list[BlockRun] = []
    for index, tier in enumerate(origins):
        _append(runs, BlockRun(index, 1, tier))
    counted: Counter[Miss] = Counter()
    for index in range(len(origins), len(keys)):
        miss, diverged_at = _reason(tiers, lookup, keys, index, len(origins))
        counted[miss] += 1
        _append(runs, BlockRun(index, 1, None, miss, diverged_at))
    if len(origins) <= len(keys) and prompt_tokens > len(keys) * tiers.block_tokens:
        _append(runs, BlockRun(len(keys), 1, None, Miss.LAST_TOKEN))
    return tuple(runs), counted


def not_read(block_tokens: int, prompt_tokens: int) -> tuple[BlockRun, ...]:
    """The one run of a prompt that was not looked up."""
    return (BlockRun(0, -(-prompt_tokens // block_tokens), None, Miss.NOT_READ),)


def _reason(
    tiers: Tiers, lookup: Lookup, keys: Sequence[BlockKey], index: int, first: int
) -> tuple[Miss, int | None]:
    known = lookup.misses.get(index)
    if known not in (None, Miss.EVICTED, Miss.TIER_DOWN):
        return known, None
    if index - first >= _EXPLAINED_BLOCKS:
        return Miss.AFTER_GAP, None
    miss, diverged_at = tiers.sightings.why_missing(keys, index)
    if known is Miss.EVICTED:
        return Miss.EVICTED, None
    if known is Miss.TIER_DOWN and miss in (Miss.NEVER_SEEN, Miss.EVICTED):
        return Miss.TIER_DOWN, None
    return miss, diverged_at


def _append(runs: list[BlockRun], run: BlockRun) -> None:
    """Add a run, or lengthen the last one if it has the same fate."""
    if runs:
        last = runs[-1]
        same = (last.tier, last.miss) == (run.tier, run.miss)
        if same and run.diverged_at is None:
            runs[-1] = BlockRun(
                last.first, last.blocks + run.blocks, last.tier, last.miss, last.diverged_at
            )
            return
    runs.append(run)
