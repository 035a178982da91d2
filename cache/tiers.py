"""The tiers of one engine and what is known across them. Owned by the engine's step loop."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cache.block import BlockKey, Owner, Tier
from cache.block_events import BlockEvents
from cache.block_pool import BlockPool
from cache.copier import Copier
from cache.host_arena import HostArena
from cache.journal import Journal
from cache.mailbox import Mailbox
from cache.redis_store import RedisTier
from cache.report import Miss
from cache.sightings import Sightings
from policies.cost import CostModel
from policies.tiering import WriteWorth

_KNOWN_STORED = 1 << 17
"""So many blocks are remembered as being in Redis; a forgotten one is at worst written again."""
_UNKNOWN_LIFE_S = 600.0
"""A block that another process wrote is taken to be in Redis for so long."""
_REMEMBERED_ERASURES = 1024


@dataclass(slots=True)
class DramTier:
    """Slots of host memory and who holds which. Without `keeps` it is only the landing between
    Redis and the device: a slot is empty again as soon as nobody holds it."""

    pool: BlockPool
    arena: HostArena
    copier: Copier
    keeps: bool

    @property
    def capacity(self) -> int:
        """How many slots there are."""
        return self.arena.slots

    def release(self, slots: Sequence[int], *, used: bool = True) -> None:
        """One holder fewer for each slot; see `BlockPool.release`."""
        self.pool.release(slots, used=used)
        if not self.keeps:
            for slot in slots:
                if self.pool.key_of(slot) is not None and self.pool.evictable_among([slot]):
                    self.pool.drop(slot)

    def find(self, key: BlockKey) -> int | None:
        """The slot that holds this block."""
        return self.pool.find(key)


class _Stored(NamedTuple):
    """A block that Redis is known to hold: until when, at least, and whose it is."""

    until_s: float
    owner: Owner


@dataclass(slots=True)
class TierCounters:
    """What `TierStats` counts and no part counts by itself."""

    hits: int = 0
    loads: int = 0
    load_s: float = 0.0
    saved_s: float = 0.0
    stores: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)


class Tiers:
    """The parts, and the bookkeeping that promotion and demotion share.

    `dram` None: no lower tier at all. `redis` needs a `dram`, if only as its landing. `copy_page`
    copies a device page to another, before the next step.
    """

    def __init__(
        self,
        device: BlockPool,
        dram: DramTier | None,
        redis: RedisTier | None,
        *,
        cost: CostModel,
        sightings: Sightings,
        block_tokens: int,
        block_bytes: int,
        copy_page: Callable[[int, int], None],
        wake: Callable[[], None],
    ) -> None:
        if redis is not None and dram is None:
            raise ValueError("Redis needs slots of host memory to land in")
        self.device = device
        self.dram = dram
        self.redis = redis
        self.cost = cost
        self.sightings = sightings
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.copy_page = copy_page
        self.mail = Mailbox(wake)
        below = dram.capacity if dram is not None else 0
        self.device_worth = WriteWorth.over(below)
        self.dram_worth = WriteWorth.over(below)
        self.counters = {tier: TierCounters() for tier in Tier}
        self.in_flight = 0
        """Transfers of any kind that still hold pages or slots."""
        self.journal = Journal(time.time_ns())
        """Of this cache's life: a later one has a larger epoch."""
        self._redis_changes = self.journal.of(Tier.REDIS)
        self._stored: OrderedDict[bytes, _Stored] = OrderedDict()  # by link
        self._stored_in_life = 0 if redis is None else redis.server_lives
        self._erasures: list[tuple[bytes | None, bytes | None]] = []
        self._erasures_before = 0
        device.changes = self.journal.of(Tier.DEVICE)
        if dram is not None and dram.keeps:  # what only lands there is gone before it is of use
            dram.pool.changes = self.journal.of(Tier.DRAM)

    def now_s(self) -> float:
        """The clock that retention goes by; tells the pools as well."""
        now = time.monotonic()
        self.device.set_time(now)
        if self.dram is not None:
            self.dram.pool.set_time(now)
        return now

    def saving_s(self, key: BlockKey) -> float:
        """What a hit on this block saves."""
        return self.cost.saving_s(key.start, self.block_tokens)

    def move_s(self, tier: str) -> float:
        """What moving one block of many to or from a lower tier takes."""
        return self.cost.load_s(tier, 1) - self.cost.load_s(tier, 0)

    def is_stored(self, key: BlockKey, for_s: float = 0.0) -> bool:
        """Whether Redis holds the block for `for_s` more seconds, as far as is known here."""
        known = self._stored.get(key.link)
        return known is not None and known.until_s >= time.monotonic() + for_s

    def note_stored(self, key: BlockKey, life_s: float | None) -> None:
        """Redis was seen to hold the block, and will for `life_s` (0.0: not known); None: it does
        not hold it."""
        known = self._stored.pop(key.link, None)
        if life_s is None:
            if known is not None:
                self._redis_changes.removed(key.link)
            return
        until_s = time.monotonic() + (life_s or _UNKNOWN_LIFE_S)
        if known is None:
            self._redis_changes.stored(key.link)
        else:
            until_s = max(until_s, known.until_s)
        self._stored[key.link] = _Stored(until_s, key.owner)
        if len(self._stored) > _KNOWN_STORED:
            oldest, _ = self._stored.popitem(last=False)
            self._redis_changes.removed(oldest)

    def notice_new_redis(self) -> None:
        """Forget what Redis was known to hold if it may have been started anew since: what is still
        above is written once more, as far as Redis has not got it, when it is worth it."""
        if self.redis is not None and self.redis.server_lives != self._stored_in_life:
            self._stored_in_life = self.redis.server_lives
            self._forget_stored(list(self._stored))

    @property
    def redis_up(self) -> bool:
        """Whether there is a Redis and its breaker lets questions through."""
        return self.redis is not None and self.redis.up

    def erasure_mark(self) -> int:
        """To be kept by whatever is under way, for `was_erased`."""
        return self._erasures_before + len(self._erasures)

    def note_erasure(self, tenant: bytes | None, scope: bytes | None) -> None:
        """Everything of this owner that is under way must come to nothing. None: of anybody."""
        self._erasures.append((tenant, scope))
        self._forget_stored(
            [
                link
                for link, (_, owner) in self._stored.items()
                if tenant in (None, owner.tenant) and scope in (None, owner.scope)
            ]
        )
        if len(self._erasures) > _REMEMBERED_ERASURES:
            half = len(self._erasures) // 2
            del self._erasures[:half]
            self._erasures_before += half

    def snapshot(self) -> BlockEvents:
        """All that every tier holds, for who has missed what was told before; of Redis, all that is
        known here and has not outlived its time."""
        now, dram = time.monotonic(), self.dram
        self._forget_stored([link for link, (until_s, _) in self._stored.items() if until_s < now])
        return self.journal.snapshot(
            {
                Tier.DEVICE: self.device.links(),
                Tier.DRAM: () if dram is None or not dram.keeps else dram.pool.links(),
                Tier.REDIS: self._stored.keys(),
            }
        )

    def _forget_stored(self, links: Sequence[bytes]) -> None:
        for link in links:
            del self._stored[link]
            self._redis_changes.removed(link)

    def was_erased(self, key: BlockKey, since: int) -> bool:
        """Whether the block's owner was erased after `since` was taken; in doubt, yes."""
        if since < self._erasures_before:
            return True
        return any(
            (tenant is None or tenant == key.owner.tenant)
            and (scope is None or scope == key.owner.scope)
            for tenant, scope in self._erasures[since - self._erasures_before :]
        )

    def count_misses(self, tier: Tier, reason: Miss, blocks: int = 1) -> None:
        """Blocks asked of a tier and not had."""
        if blocks:
            self.counters[tier].misses[reason.value] += blocks
