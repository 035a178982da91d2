"""What the tiers say of themselves, and of one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cache.block import Tier


class Miss(StrEnum):
    """Why a block was not taken from any tier."""

    NEVER_SEEN = "never_seen"
    DIVERGED = "diverged"
    """A known prompt begins the same and differs inside this block."""
    EVICTED = "evicted"
    OTHER_SALT = "other_salt"
    """The same text is, or was, cached for another tenant, user or salt."""
    LOAD_SLOWER = "load_slower"
    """It was there, and computing it was predicted to be faster than moving it."""
    TIER_DOWN = "tier_down"
    LATE = "late"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    """Redis held something of another identity, owner or text under the block's key, or the block
    sealed where it should not be, or the other way round."""
    NO_ROOM = "no_room"
    AFTER_GAP = "after_gap"
    """A block before it was missing."""
    NOT_READ = "not_read"
    """The request asked not to read the cache, or shares KV with nobody."""
    LAST_TOKEN = "last_token"
    """The block is not full, or holds the last token, which is always computed."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Adjacent blocks of one prompt with one fate: blocks `first` to `first + blocks - 1`.

    `tier` is where they came from, or None, and then `miss` says why. `diverged_at` is the position
    in the prompt where the nearest known prompt differs, for `Miss.DIVERGED`.
    """

    first: int
    blocks: int
    tier: Tier | None
    miss: Miss | None = None
    diverged_at: int | None = None


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How one prompt met the cache, settled once, when it first runs. Token counts are of prompt
    tokens; `load_s` is how long it waited for lower tiers. `runs` cover the prompt in order."""

    block_tokens: int
    device_tokens: int = 0
    dram_tokens: int = 0
    redis_tokens: int = 0
    load_s: float = 0.0
    runs: tuple[BlockRun, ...] = ()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.device_tokens + self.dram_tokens + self.redis_tokens


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier's counters since start, and its state now.

    Blocks for device and DRAM: `free + cached + held == total`. For Redis they are zero, and
    `used_bytes` is this model's share as last counted. `loads` and `stores` are blocks that left
    this tier upwards and came into it; `load_s` is what loads took, `saved_s` the computing that
    hits in this tier saved, as predicted. `misses` counts blocks by reason; `up` is False while a
    breaker is open.
    """

    tier: Tier
    free: int = 0
    cached: int = 0
    held: int = 0
    total: int = 0
    used_bytes: int = 0
    total_bytes: int = 0
    hits: int = 0
    loads: int = 0
    load_s: float = 0.0
    saved_s: float = 0.0
    stores: int = 0
    evictions: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Stores that did not happen, by reason: busy, no_room, quota, too_big, refused, error,
    not_worth_it."""
    misses: Mapping[str, int] = field(default_factory=dict)
    up: bool = True


@dataclass(frozen=True, slots=True)
class TenantShare:
    """Blocks of one tenant (by its tag) in each tier now; Redis counts are approximate."""

    tenant: bytes
    device: int
    dram: int
    redis: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Every tier that is on, from device to Redis, and who has how much of them."""

    tiers: tuple[TierStats, ...]
    tenants: tuple[TenantShare, ...]


@dataclass(frozen=True, slots=True)
class Erased:
    """Blocks removed from each tier. `redis` is None if Redis could not be asked."""

    device: int
    dram: int
    redis: int | None
