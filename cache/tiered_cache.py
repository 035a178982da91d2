"""The prompt cache of one engine: device pages over DRAM over Redis, as one thing.

The step loop owns it: every method is for that thread unless it says otherwise. What the tiers do
meanwhile comes back when the loop calls `settle`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing

from cache.block import BlockKey, Retention, Tier
from cache.block_events import BlockEvents
from cache.block_pool import BlockPool, Share
from cache.demotion import Demotion
from cache.explanation import explain
from cache.last_save import save_all
from cache.promotion import Found, Lookup, Promotion
from cache.report import CacheStats, CacheUse, Erased
from cache.stocktaking import take_stock
from cache.tiers import Tiers
from policies.cost import CostModel
from policies.tiering import WriteWorth


class TieredCache:
    """Finds, loads, keeps and gives up blocks. See `cache.promotion` for the way up, and
    `cache.demotion` for the way down."""

    def __init__(self, tiers: Tiers, *, ahead: int, write_through: bool = False) -> None:
        """`ahead`: so many of the device's next victims shall have their copy below."""
        self._tiers = tiers
        self._promotion = Promotion(tiers)
        self._demotion = Demotion(tiers, ahead=ahead, write_through=write_through)
        self._latest_child: OrderedDict[bytes, BlockKey] = OrderedDict()
        tiers.device.on_evict = lambda _, key: self._demotion.pushed_from_device(key)
        if tiers.dram is not None:
            tiers.dram.pool.on_evict = lambda _, key: self._demotion.pushed_from_dram(key)
        tiers.sightings.on_forgotten = lambda _, tier: self._worth(tier).forgotten()

    @property
    def device(self) -> BlockPool:
        """The pages."""
        return self._tiers.device

    @property
    def cost(self) -> CostModel:
        """Predicts what steps and loads take; learns from those that are observed."""
        return self._tiers.cost

    @property
    def has_mail(self) -> bool:
        """Whether `settle` has something to do. Any thread."""
        return bool(self._tiers.mail)

    @property
    def quiet(self) -> bool:
        """Whether no transfer holds pages or slots."""
        return not self._tiers.in_flight and not self._tiers.mail

    @property
    def has_events(self) -> bool:
        """Whether `take_events` has something to tell."""
        return bool(self._tiers.journal)

    @property
    def copies_down(self) -> bool:
        """Whether copies to a lower tier hold pages that nobody else may be using."""
        return self._demotion.copying

    def settle(self) -> None:
        """Take in what other threads have finished."""
        self._tiers.mail.deliver()

    def maintain(self) -> None:
        """Between steps: copy down what will be pushed out soon."""
        self._tiers.notice_new_redis()
        self._demotion.maintain(self._tiers.now_s())

    def look_up(self, keys: Sequence[BlockKey], tenant: bytes, prompt_tokens: int) -> Lookup:
        """A prompt is queued: note that its blocks were asked for, search the lower tiers."""
        tiers = self._tiers
        tiers.sightings.see(keys)
        for key in keys:
            came_from = tiers.sightings.came_back(key)
            if came_from is not None:
                self._worth(came_from).asked_again()
        return self._promotion.look_up(keys, tenant, prompt_tokens)

    def answer_due_s(self) -> float:
        """How long to put off a step for Redis's answer about a prompt that was just queued: a
        question takes a fraction of a millisecond, and waiting for the next step tens of them."""
        return self._promotion.answer_due_s()

    def blocks_held(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first of `keys` are on the device or, behind those, in DRAM."""
        dram, held = self._tiers.dram, len(self._tiers.device.match(keys))
        while dram is not None and held < len(keys) and dram.find(keys[held]) is not None:
            held += 1
        return held

    def find(self, lookup: Lookup, keys: Sequence[BlockKey]) -> Found:
        """What can be had of `keys` now."""
        return self._promotion.find(lookup, keys)

    def load(
        self, slots: Sequence[int], pages: Sequence[int], done: Callable[[bool], None]
    ) -> None:
        """Copy DRAM slots into held pages; `done` comes in a later `settle`."""
        self._promotion.load(slots, pages, done)

    def close_lookup(self, lookup: Lookup) -> None:
        """The prompt has started or is gone. Idempotent."""
        self._promotion.close(lookup)

    def publish(self, page: int, key: BlockKey, retention: Sequence[Retention]) -> None:
        """A held page now holds this block, for others to find."""
        tiers = self._tiers
        until_s = 0.0
        end = key.start + tiers.block_tokens
        for wish in retention:
            if end <= wish.tokens:
                until_s = max(until_s, time.monotonic() + wish.seconds)
        hits = 0
        twin = tiers.device.find(key)
        if twin is not None and twin != page and tiers.device.evictable_among([twin]):
            # Computed once more by who does not read the cache. The twin would be pinned below what
            # this sequence publishes next, and held by nobody take the room that it needs.
            hits = tiers.device.hits_of(twin)
            until_s = max(until_s, tiers.device.keep_until_of(twin))
            tiers.device.drop(twin)
        tiers.device.publish(
            page, key, saving_s=tiers.saving_s(key), hits=hits, keep_until_s=until_s
        )
        self._latest_child[key.parent] = key
        self._latest_child.move_to_end(key.parent)
        if len(self._latest_child) > tiers.device.counts().total:
            self._latest_child.popitem(last=False)

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Have none of these blocks on the device or in DRAM any more; who holds one keeps it."""
        pools = [self._tiers.device]
        if self._tiers.dram is not None:
            pools.append(self._tiers.dram.pool)
        for pool in pools:
            for index in map(pool.find, keys):
                if index is not None:
                    pool.drop(index)

    def use(
        self,
        lookup: Lookup,
        keys: Sequence[BlockKey],
        pages: Sequence[int],
        loaded: range,
        computed: int,
        prompt_tokens: int,
        retention: Sequence[Retention],
    ) -> CacheUse:
        """A prompt of `prompt_tokens` starts with its first `computed` tokens in `pages`, the first
        of which stand under the first of its `keys`: count it, once per request.

        The pages at indexes `loaded` were copied up for it. The last page may be used in part, and
        may belong to the tail that has no key.
        """
        tiers = self._tiers
        tokens = dict.fromkeys(Tier, 0)
        origins: list[Tier] = []
        for index in range(len(pages)):
            tier = Tier.DEVICE
            if index < len(keys) and keys[index].link in lookup.from_redis:
                tier = Tier.REDIS
            elif index in loaded:
                # without a DRAM tier, a block lands for one prompt and is there for others as well
                tier = Tier.DRAM if tiers.dram is not None and tiers.dram.keeps else Tier.REDIS
            start = index * tiers.block_tokens
            used = min(tiers.block_tokens, computed - start)
            origins.append(tier)
            tokens[tier] += used
            tiers.counters[tier].hits += 1
            tiers.counters[tier].saved_s += tiers.cost.saving_s(start, used)
        published = [page for page in pages if tiers.device.key_of(page) is not None]
        tiers.device.touch(published)
        for wish in retention:
            kept = published[: wish.tokens // tiers.block_tokens]
            tiers.device.keep(kept, time.monotonic() + wish.seconds)
        runs, misses = explain(tiers, lookup, keys, origins, prompt_tokens)
        for reason, blocks in misses.items():
            tiers.count_misses(Tier.DEVICE, reason, blocks)
        return CacheUse(
            block_tokens=tiers.block_tokens,
            device_tokens=tokens[Tier.DEVICE],
            dram_tokens=tokens[Tier.DRAM],
            redis_tokens=tokens[Tier.REDIS],
            load_s=lookup.waited_s,
            runs=runs,
        )

    def find_beginning(self, parent: bytes, token_bytes: bytes) -> int | None:
        """A device page that begins with these tokens (little-endian uint32) after `parent`."""
        key = self._latest_child.get(parent)
        if key is None or not key.token_bytes.startswith(token_bytes):
            return None
        return self._tiers.device.find(key)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a device page to another that is held for it."""
        self._tiers.copy_page(source, target)

    def prompt_done(
        self, keys: Sequence[BlockKey], pages: Sequence[int], retention: Sequence[Retention]
    ) -> None:
        """A prompt's blocks, `keys` in `pages`, are all published: write those down that were asked
        for before, or were asked to last."""
        self._demotion.store_pages(self._asked_before(keys, pages))
        for wish in retention:
            if wish.durable:
                self._demotion.keep_durably(pages[: wish.tokens // self._tiers.block_tokens], wish)

    def sequence_done(self, pages: Sequence[int]) -> None:
        """A sequence is about to release its pages."""
        if self._demotion.writes_through:
            self._demotion.copy_down(pages)

    def set_shares(
        self, device: Mapping[bytes, Share], dram: Mapping[bytes, Share], redis: Mapping[bytes, int]
    ) -> None:
        """Floors and quotas by tenant tag: in blocks for device and DRAM, in bytes for Redis."""
        self._tiers.device.set_shares(device)
        if self._tiers.dram is not None:
            self._tiers.dram.pool.set_shares(dram)
        if self._tiers.redis is not None:
            self._tiers.redis.set_quotas(redis)

    def erase(self, tenant: bytes | None, scope: bytes | None) -> tuple[Erased, Future[int] | None]:
        """Take an owner's blocks (None: everybody's) out of device and DRAM, and begin to take them
        out of Redis; what is on its way comes to nothing."""
        tiers = self._tiers
        tiers.note_erasure(tenant, scope)
        tiers.sightings.erase(tenant, scope)
        pools = [tiers.device] + ([tiers.dram.pool] if tiers.dram is not None else [])
        counts = []
        for pool in pools:
            gone = pool.clear() if tenant is None else pool.drop_owned(tenant, scope)
            counts.append(len(gone))
        erased = Erased(counts[0], counts[1] if len(counts) > 1 else 0, 0)
        if tiers.redis is None:
            return erased, None
        return erased, tiers.redis.erase(tenant, scope)

    def clear_dram(self) -> None:
        """Empty the DRAM tier alone."""
        if self._tiers.dram is not None:
            self._tiers.dram.pool.clear()

    def take_events(self) -> BlockEvents | None:
        """The next batch of what the tiers have come to hold or lost; None for nothing."""
        return self._tiers.journal.take()

    def snapshot(self) -> BlockEvents:
        """All that the tiers hold, as the next batch."""
        return self._tiers.snapshot()

    def stats(self) -> CacheStats:
        """Every tier's counters. Any thread."""
        return take_stock(self._tiers)

    def save(self, timeout_s: float) -> None:
        """Write what device and DRAM hold to Redis, as far as time allows. The loop has stopped."""
        save_all(self._tiers, self._demotion, timeout_s)

    def close(self) -> None:
        """Wait for transfers that touch pages; nothing is taken in any more."""
        if self._tiers.dram is not None:
            self._demotion.close()
            with closing(self._tiers.dram.arena):
                self._tiers.dram.copier.close()
                self._tiers.mail.deliver()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every tier's books agree."""
        self._tiers.device.check_integrity()
        if self._tiers.dram is not None:
            self._tiers.dram.pool.check_integrity()
            if self.quiet and not self._promotion.holds_slots:
                assert self._tiers.dram.pool.counts().held == 0, "an idle cache holds DRAM slots"

    def _asked_before(self, keys: Sequence[BlockKey], pages: Sequence[int]) -> list[int]:
        seen = self._tiers.sightings.times_seen
        return [page for key, page in zip(keys, pages, strict=False) if seen(key) > 1]

    def _worth(self, tier: Tier) -> WriteWorth:
        return self._tiers.device_worth if tier is Tier.DEVICE else self._tiers.dram_worth
