"""Down the tiers: blocks are copied to the next tier before they are pushed out of theirs.

Eviction itself never waits. A little ahead of it, the blocks that would go next are copied down, if
that is worth its cost, so that taking their place is free when it is needed. Writes to Redis are
selective: what was seen a second time, what its tenant asked to keep, and what DRAM pushes out.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache.block import BlockKey, Retention, Tier
from cache.block_pool import BlockPool
from cache.durable_wishes import DurableWishes
from cache.tiers import Tiers
from policies.tiering import WriteWorth

BLOCKS_AT_ONCE = 16
"""Blocks that are copied or sent as one piece of work."""
_LIFE_MARGIN = 1.25
"""Blocks that are to live long are written to live longer, so that using them again within that
time does not write them again."""
_STORING_SHARE = 0.25
"""Of the DRAM slots, at most so many are held for writes to Redis."""


class _Front:
    """The blocks that a pool would push out next, and how many of them are known to have been
    looked after: copied down, or judged not to be worth it."""

    def __init__(self, pool: BlockPool, ahead: int) -> None:
        self._pool = pool
        self._ahead = ahead
        self._looked_after = 0
        self._seen = (-1, -1)

    def passed(self) -> None:
        """The first of them was pushed out."""
        self._looked_after -= 1

    def due(self, now_s: float) -> list[int]:
        """Those to look after now, in order: none while enough are, or while nothing was taken
        since, since what could not be copied then cannot be now."""
        free = self._pool.counts().free
        if free >= self._ahead or self._looked_after > self._ahead // 2:
            return []
        if (seen := (free, self._pool.evictions)) == self._seen:
            return []
        self._seen = seen
        victims = self._pool.next_victims(self._ahead - free, now_s)
        self._looked_after = len(victims)
        return victims


class Demotion:
    """Copies blocks down and writes them to Redis. Step-loop thread only.

    `ahead` is how many of the next victims of the device pool shall have their copy below.
    """

    def __init__(self, tiers: Tiers, *, ahead: int, write_through: bool) -> None:
        self._tiers = tiers
        self._through = write_through
        self._copying: dict[bytes, float | None] = {}
        """What is on its way to DRAM, and for how long it shall be in Redis after that; None is not
        at all."""
        self._storing: set[bytes] = set()
        self._wishes = DurableWishes()
        self._pages = _Front(tiers.device, ahead)
        self._slots = _Front(tiers.dram.pool, ahead) if tiers.dram is not None else None

    @property
    def copying(self) -> bool:
        """Whether copies to DRAM are under way."""
        return bool(self._copying)

    @property
    def writes_through(self) -> bool:
        """Whether blocks come down when their sequence is done, not when they are pushed out."""
        return self._through

    @property
    def room_for_stores(self) -> int:
        """How many more blocks can be on their way to Redis now; not less than nothing."""
        dram = self._tiers.dram
        assert dram is not None
        share = int(dram.capacity * _STORING_SHARE) if dram.keeps else dram.capacity
        return max(0, max(1, share) - len(self._storing))

    def maintain(self, now_s: float) -> None:
        """Copy down what is about to be pushed out; cheap when nothing has changed."""
        dram = self._tiers.dram
        if self._wishes.due_again(now_s):
            self._fulfil_wishes(now_s)
        if dram is None or self._slots is None or not dram.keeps:
            return
        if pages := self._pages.due(now_s):
            self.copy_down([page for page in pages if self._is_worth_copying(page)])
        if self._tiers.redis_up and (slots := self._slots.due(now_s)):
            self.store([slot for slot in slots if self._is_worth_storing(slot)])

    def copy_down(
        self, pages: Sequence[int], *, then_store: bool = False, for_s: float = 0.0
    ) -> None:
        """Copy published pages to DRAM; what is there already, or on the way, is left out.

        `then_store` sends them on to Redis, to be there for `for_s`. Blocks for which there is no
        slot are left out too.
        """
        tiers, dram = self._tiers, self._tiers.dram
        if dram is None:
            return
        below: list[int] = []
        moves: list[tuple[int, int]] = []
        keys: list[BlockKey] = []
        for page in pages:
            key = tiers.device.key_of(page)
            if key is None:
                continue
            if key.link in self._copying:
                if then_store:  # it goes on as soon as it has come down
                    self._copying[key.link] = max(for_s, self._copying[key.link] or 0.0)
                continue
            if (slot := dram.find(key)) is not None:
                below.append(slot)
                continue
            tenant = key.owner.tenant
            if not then_store and not dram.pool.may_stay(tenant):
                tiers.counters[Tier.DRAM].dropped["quota"] += 1
                continue
            if not dram.pool.available(tenant) or (then_store and not self.room_for_stores):
                tiers.counters[Tier.DRAM].dropped["no_room"] += 1
                continue
            moves.append((page, dram.pool.take(1, tenant)[0]))
            keys.append(key)
            self._copying[key.link] = for_s if then_store else None
        if then_store:
            self.store(below, for_s)
        for start in range(0, len(moves), BLOCKS_AT_ONCE):
            part = slice(start, start + BLOCKS_AT_ONCE)
            self._download(moves[part], keys[part])

    def store(self, slots: Sequence[int], for_s: float = 0.0) -> None:
        """Write DRAM slots to Redis, those that are not known to be there for `for_s` more."""
        tiers, dram, redis = self._tiers, self._tiers.dram, self._tiers.redis
        if redis is None or dram is None or not redis.up:
            return
        life_s = max(redis.ttl_s, for_s * _LIFE_MARGIN)
        batch: list[tuple[BlockKey, int]] = []
        for slot in slots:
            key = dram.pool.key_of(slot)
            if key is None or key.link in self._storing:
                continue
            if tiers.is_stored(key, for_s):
                continue
            if self.room_for_stores <= len(batch):
                tiers.counters[Tier.REDIS].dropped["busy"] += 1
                continue
            batch.append((key, slot))
        for start in range(0, len(batch), BLOCKS_AT_ONCE):
            self._send(batch[start : start + BLOCKS_AT_ONCE], life_s)

    def store_pages(self, pages: Sequence[int]) -> None:
        """Write published pages to Redis, through DRAM, if they are not known to be there. While
        there is no Redis they get as far as DRAM."""
        tiers, dram = self._tiers, self._tiers.dram
        if not tiers.redis_up:
            if dram is not None and dram.keeps:
                self.copy_down(pages)
            return
        wanted = []
        for page in pages:
            key = tiers.device.key_of(page)
            if key is not None and not tiers.is_stored(key) and key.link not in self._storing:
                wanted.append(page)
        if wanted:
            self.copy_down(wanted, then_store=True)

    def keep_durably(self, pages: Sequence[int], retention: Retention) -> None:
        """Write pages to Redis with at least the retention's lifetime: what there is no room for
        now, or Redis does not take, later, as long as the blocks are on the device or in DRAM."""
        if self._tiers.redis is None:
            return
        now_s, mark = self._tiers.now_s(), self._tiers.erasure_mark()
        for page in pages:
            key = self._tiers.device.key_of(page)
            if key is not None and not self._tiers.is_stored(key, retention.seconds):
                self._wishes.add(key, retention.seconds, now_s, mark)
        self._fulfil_wishes(now_s)

    def close(self) -> None:
        """Copy nothing down any more because it was to last: the copier goes."""
        self._wishes.clear()

    def pushed_from_device(self, key: BlockKey) -> None:
        """The device pool evicts a block."""
        tiers, dram = self._tiers, self._tiers.dram
        self._pages.passed()
        tiers.sightings.pushed_out(key, Tier.DEVICE)
        tiers.device_worth.pushed_out()
        if dram is not None and dram.keeps and dram.find(key) is None:
            tiers.counters[Tier.DRAM].dropped["not_worth_it"] += 1

    def pushed_from_dram(self, key: BlockKey) -> None:
        """DRAM evicts a block."""
        tiers = self._tiers
        if self._slots is not None:
            self._slots.passed()
        tiers.sightings.pushed_out(key, Tier.DRAM)
        tiers.dram_worth.pushed_out()
        if tiers.redis is not None and not tiers.is_stored(key):
            tiers.counters[Tier.REDIS].dropped["not_worth_it"] += 1

    def _fulfil_wishes(self, now_s: float) -> None:
        """Write as many of the blocks that are to last as there is room for."""
        tiers, dram = self._tiers, self._tiers.dram
        if dram is None or not tiers.redis_up:
            return
        # what is being copied may be on its way to Redis as well
        room = self.room_for_stores - len(self._copying)
        if room <= 0:
            return
        above: dict[float, list[int]] = {}  # by the seconds that they shall last
        below: dict[float, list[int]] = {}
        for wish in self._wishes.open(now_s):
            key = wish.key
            if room <= 0:
                break
            if tiers.was_erased(key, wish.erasure_mark):
                self._wishes.withdraw(key)
                continue
            if key.link in self._storing or key.link in self._copying:
                continue
            self._wishes.tried(key, now_s)
            if (slot := dram.find(key)) is not None:
                below.setdefault(wish.seconds, []).append(slot)
            elif (page := tiers.device.find(key)) is not None:
                above.setdefault(wish.seconds, []).append(page)
            else:
                self._wishes.withdraw(key)
                continue
            room -= 1
        for seconds, slots in below.items():
            self.store(slots, seconds)
        for seconds, pages in above.items():
            self.copy_down(pages, then_store=True, for_s=seconds)

    def _is_worth_copying(self, page: int) -> bool:
        tiers, dram = self._tiers, self._tiers.dram
        assert dram is not None
        key = tiers.device.key_of(page)
        if key is None or dram.find(key) is not None or key.link in self._copying:
            return False
        return self._is_worth(key, tiers.device.hits_of(page), Tier.DRAM, tiers.device_worth)

    def _is_worth_storing(self, slot: int) -> bool:
        tiers, dram = self._tiers, self._tiers.dram
        assert dram is not None
        key = dram.pool.key_of(slot)
        if key is None or tiers.is_stored(key) or key.link in self._storing:
            return False
        return self._is_worth(key, dram.pool.hits_of(slot), Tier.REDIS, tiers.dram_worth)

    def _is_worth(self, key: BlockKey, hits: int, below: Tier, worth: WriteWorth) -> bool:
        move_s = self._tiers.move_s(below)
        saving_s = self._tiers.saving_s(key)
        return worth.is_worth(hits=hits, saving_s=saving_s, load_s=move_s, store_s=move_s)

    def _download(self, moves: Sequence[tuple[int, int]], keys: Sequence[BlockKey]) -> None:
        tiers, dram = self._tiers, self._tiers.dram
        assert dram is not None
        pages = [page for page, _ in moves]
        slots = [slot for _, slot in moves]
        tiers.device.hold(pages)
        tiers.in_flight += 1
        mark = tiers.erasure_mark()

        def copied(seconds: float | None) -> None:
            tiers.mail.post(lambda: settle(seconds))

        def settle(seconds: float | None) -> None:
            tiers.in_flight -= 1
            arrived = 0
            go_on: dict[float, list[int]] = {}  # by the seconds that they shall last
            for page, slot, key in zip(pages, slots, keys, strict=True):
                store_for_s = self._copying.pop(key.link)
                if seconds is None or tiers.was_erased(key, mark):
                    continue
                dram.pool.publish(
                    slot,
                    key,
                    saving_s=tiers.saving_s(key),
                    hits=tiers.device.hits_of(page),
                    keep_until_s=tiers.device.keep_until_of(page),
                )
                arrived += 1
                if store_for_s is not None:
                    go_on.setdefault(store_for_s, []).append(slot)
            tiers.counters[Tier.DRAM].stores += arrived
            for for_s, slots_to_store in go_on.items():
                self.store(slots_to_store, for_s)
            dram.release(slots)
            tiers.device.release(pages, used=False)
            if self._wishes:
                self._fulfil_wishes(tiers.now_s())

        dram.copier.download(moves, copied)

    def _send(self, batch: Sequence[tuple[BlockKey, int]], life_s: float) -> None:
        tiers, dram, redis = self._tiers, self._tiers.dram, self._tiers.redis
        assert dram is not None
        assert redis is not None
        slots = [slot for _, slot in batch]
        mark = tiers.erasure_mark()

        def sent(outcomes: tuple[bool, ...]) -> None:
            tiers.mail.post(lambda: settle(outcomes))

        def settle(outcomes: tuple[bool, ...]) -> None:
            tiers.in_flight -= 1
            self._storing.difference_update(key.link for key, _ in batch)
            erased = set()
            for (key, _), stored in zip(batch, outcomes, strict=True):
                if stored and tiers.was_erased(key, mark):
                    erased.add(key.owner)
                elif stored:
                    tiers.note_stored(key, life_s)
                    self._wishes.stored(key, life_s)
            for owner in erased:  # the write may have overtaken the erasure
                redis.erase(owner.tenant, owner.scope)
            tiers.counters[Tier.REDIS].stores += sum(outcomes)
            dram.release(slots, used=False)
            if self._wishes and any(outcomes):
                self._fulfil_wishes(tiers.now_s())

        dram.pool.hold(slots)
        self._storing.update(key.link for key, _ in batch)
        tiers.in_flight += 1
        accepted = redis.store([(key, dram.arena.value(slot)) for key, slot in batch], sent, life_s)
        if not accepted:
            settle(tuple(False for _ in batch))
