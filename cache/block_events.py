"""What a replica's tiers have come to hold or have lost, as its owner tells others.

Batches are numbered from 1 within an *epoch*, one life of one cache: a batch that is missing or
comes twice shows, and a restarted replica cannot be taken for the one that held the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.block import Tier


@dataclass(frozen=True, slots=True)
class TierChange:
    """One tier's net change since the batch before: no link is in both. Links are those of
    `BlockKey`, for blocks of the replica's own size."""

    tier: Tier
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """One batch. Batch `seq` follows batch `seq - 1` of the same `epoch`.

    A `snapshot` is everything that is held after batch `seq`: what was told before is void.
    Redis is told of as far as this replica wrote there or saw it; what expires unseen is not.
    """

    epoch: int
    seq: int
    changes: tuple[TierChange, ...]
    snapshot: bool = False
