"""Up the tiers: what a prompt finds, from Redis into DRAM while it waits, from DRAM into pages.

A prompt's missing blocks are looked up when it is queued: the first one, and if it is there all the
others in one question. Nothing here blocks: what takes time runs on other threads and comes back
through the mailbox; a prompt whose KV is on the way waits in its own state. Whatever is late,
missing or wrong is computed instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from cache.block import BlockKey, Tier
from cache.redis_store import Fetched, Probe
from cache.report import Miss
from cache.tiers import Tiers
from policies.tiering import SecondLook, choose_load, load_deadline_s, probe_is_worth

_LANDING_SHARE = 0.5
"""Of the DRAM slots, at most so many are held for prompts that wait; the others stay evictable."""
_PATIENCE_S = 0.002
"""A step is put off for so long at most, for an answer that lets a prompt begin in it."""
_LONG_ROUND_TRIP_S = 0.005
"""Of a Redis that takes so long, no answer is waited for."""
_LATE_IN_A_ROW = 2
"""After so many loads that ran out of time, Redis is too slow to load from until one is in time."""


@dataclass(eq=False, slots=True)
class Lookup:
    """One prompt's search in the lower tiers. `pending` until it is known what can be had.

    `prompt_tokens` are all that it has to compute or load, tokens generated before included.
    `slots` are DRAM slots held for it, by block index; `from_redis` the blocks that came from Redis
    for this prompt; `misses` why a block did not come, by block index.
    """

    keys: Sequence[BlockKey]
    tenant: bytes
    prompt_tokens: int
    erasure_mark: int
    pending: bool = False
    closed: bool = False
    waited_s: float = 0.0
    slots: dict[int, int] = field(default_factory=dict)
    from_redis: set[bytes] = field(default_factory=set)
    misses: dict[int, Miss] = field(default_factory=dict)
    _started_s: float = 0.0

    def begin(self) -> None:
        """It waits from now on, if it does not already."""
        if not self.pending:
            self.pending = True
            self._started_s = time.monotonic()

    def settle(self) -> None:
        """It waits no longer."""
        if self.pending:
            self.pending = False
            self.waited_s += time.monotonic() - self._started_s


@dataclass(slots=True)
class Found:
    """What a prompt can start from: pages it can hold at once, and DRAM slots behind them whose
    content has to be copied into pages first."""

    pages: list[int]
    slots: list[int]


class Promotion:
    """Looks up, fetches and loads. Step-loop thread only."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._landing_slots = 0
        self._ask_again = SecondLook()
        self._load_again = SecondLook()
        self._late_loads = 0  # since one was whole
        self._asked: dict[Lookup, float] = {}  # questions that are open, and since when
        self._incoming: dict[bytes, list[Lookup]] = {}  # being fetched: link -> who waits for it

    def look_up(self, keys: Sequence[BlockKey], tenant: bytes, prompt_tokens: int) -> Lookup:
        """Search the lower tiers for what the device does not hold of `keys`."""
        lookup = Lookup(keys, tenant, prompt_tokens, self._tiers.erasure_mark())
        self._search(lookup)
        return lookup

    def find(self, lookup: Lookup, keys: Sequence[BlockKey]) -> Found:
        """The longest prefix of `keys` on the device and, behind it, in DRAM; holds nothing."""
        pages = self._tiers.device.match(keys)
        slots: list[int] = []
        dram = self._tiers.dram
        if dram is not None:
            for key in keys[len(pages) :]:
                slot = dram.find(key)
                if slot is None:
                    break
                slots.append(slot)
            if slots and not choose_load(
                [("dram", len(slots))],
                start_block=len(pages),
                block_tokens=self._tiers.block_tokens,
                prompt_tokens=lookup.prompt_tokens,
                cost=self._tiers.cost,
            ):
                for index in range(len(pages), len(pages) + len(slots)):
                    lookup.misses[index] = Miss.LOAD_SLOWER
                slots = []
        return Found(pages, slots)

    def load(
        self, slots: Sequence[int], pages: Sequence[int], done: Callable[[bool], None]
    ) -> None:
        """Copy DRAM slots into pages; `done(whether it worked)` comes on this thread, later.

        The caller holds the pages until then; the slots are held here.
        """
        tiers, dram = self._tiers, self._tiers.dram
        assert dram is not None
        dram.pool.hold(slots)
        dram.pool.touch(slots)
        tiers.in_flight += 1

        def copied(seconds: float | None) -> None:
            tiers.mail.post(lambda: settle(seconds))

        def settle(seconds: float | None) -> None:
            tiers.in_flight -= 1
            dram.release(slots)
            if seconds is not None:
                tiers.cost.observe_load("dram", len(slots), seconds)
                tiers.counters[Tier.DRAM].loads += len(slots)
                tiers.counters[Tier.DRAM].load_s += seconds
            done(seconds is not None)

        dram.copier.upload(list(zip(slots, pages, strict=True)), copied)

    def answer_due_s(self) -> float:
        """How much longer to expect the youngest open question's answer; 0.0 if none is worth
        waiting for."""
        round_trip_s = self._tiers.cost.load_s("redis", 0)
        if not self._asked or round_trip_s > _LONG_ROUND_TRIP_S:
            return 0.0
        return max(0.0, max(self._asked.values()) + _PATIENCE_S - time.monotonic())

    @property
    def holds_slots(self) -> bool:
        """Whether any prompt that waits has slots held for it."""
        return self._landing_slots > 0

    def close(self, lookup: Lookup) -> None:
        """Nobody needs it any more: give back the slots that it holds. Idempotent."""
        lookup.closed = True
        lookup.settle()
        slots = list(lookup.slots.values())
        lookup.slots.clear()
        if slots:
            self._landing_slots -= len(slots)
            assert self._tiers.dram is not None
            self._tiers.dram.release(slots)

    def _search(self, lookup: Lookup) -> None:
        tiers, dram, redis = self._tiers, self._tiers.dram, self._tiers.redis
        if dram is None:
            return
        first = len(tiers.device.match(lookup.keys))
        missing = range(first, len(lookup.keys))
        unknown = [index for index in missing if dram.find(lookup.keys[index]) is None]
        if redis is None or not unknown:
            return
        if not redis.up:
            for index in unknown:
                lookup.misses[index] = Miss.TIER_DOWN
            tiers.count_misses(Tier.REDIS, Miss.TIER_DOWN, len(unknown))
            return
        if self._waits_for_another(lookup, [lookup.keys[unknown[0]]]):
            return
        start_token = unknown[0] * tiers.block_tokens
        worth = probe_is_worth(len(unknown), tiers.block_tokens, start_token, tiers.cost)
        if not worth and not self._ask_again.due(time.monotonic()):
            return
        self._hold(lookup, sorted(set(missing).difference(unknown)))
        lookup.begin()
        # without the first of them the others are of no use: most questions end there
        self._ask(lookup, unknown, 1)

    def _ask(self, lookup: Lookup, unknown: Sequence[int], blocks: int) -> None:
        """Ask Redis for the first `blocks` of these."""
        tiers, redis = self._tiers, self._tiers.redis
        assert redis is not None
        tiers.in_flight += 1
        asked_s = self._asked[lookup] = time.monotonic()

        def answered(probe: Probe) -> None:
            seconds = time.monotonic() - asked_s
            tiers.mail.post(lambda: self._probed(lookup, unknown, blocks, probe, seconds))

        redis.probe([lookup.keys[index] for index in unknown[:blocks]], answered)

    def _waits_for_another(self, lookup: Lookup, keys: Sequence[BlockKey]) -> bool:
        """Whether one of these blocks is on its way for another prompt; then look again when it is
        there."""
        for key in keys:
            if (waiters := self._incoming.get(key.link)) is not None:
                lookup.begin()
                waiters.append(lookup)
                return True
        return False

    def _hold(self, lookup: Lookup, indexes: Sequence[int]) -> None:
        """Keep what is in DRAM there while Redis is asked for what lies between."""
        dram = self._tiers.dram
        assert dram is not None
        for index in indexes:
            slot = dram.find(lookup.keys[index])
            if slot is None or index in lookup.slots or not self._landing_room():
                continue
            dram.pool.hold([slot])
            lookup.slots[index] = slot
            self._landing_slots += 1

    def _landing_room(self) -> int:
        dram = self._tiers.dram
        assert dram is not None
        limit = int(dram.capacity * _LANDING_SHARE) if dram.keeps else dram.capacity
        return max(0, limit - self._landing_slots)

    def _probed(
        self, lookup: Lookup, unknown: Sequence[int], blocks: int, probe: Probe, seconds: float
    ) -> None:
        tiers = self._tiers
        tiers.in_flight -= 1
        del self._asked[lookup]
        if probe.failed is not None:
            for index in unknown:
                lookup.misses[index] = probe.failed
            tiers.count_misses(Tier.REDIS, probe.failed, len(unknown))
            lookup.settle()
            return
        tiers.cost.observe_load("redis", 0, seconds)
        if blocks < len(unknown) and all(probe.present) and not lookup.closed:
            self._ask(lookup, unknown, len(unknown))
            return
        present: set[int] = set()
        for asked, (index, there) in enumerate(zip(unknown, probe.present, strict=False)):
            if tiers.was_erased(lookup.keys[index], lookup.erasure_mark):
                continue  # the answer may be from before
            problem = Miss.EVICTED if tiers.is_stored(lookup.keys[index]) else None
            if asked in probe.damaged:
                problem = Miss.CORRUPT
            elif asked in probe.foreign:
                problem = Miss.FOREIGN
            if not there and problem is not None:
                lookup.misses[index] = problem
                tiers.count_misses(Tier.REDIS, problem)
            tiers.note_stored(lookup.keys[index], 0.0 if there else None)
            if there:
                present.add(index)
        if lookup.closed:
            return
        wanted = self._choose(lookup, present)
        if self._waits_for_another(lookup, [lookup.keys[index] for index in wanted]):
            return
        if wanted and not tiers.was_erased(lookup.keys[wanted[0]], lookup.erasure_mark):
            self._fetch(lookup, wanted)
        else:
            lookup.settle()

    def _choose(self, lookup: Lookup, present: set[int]) -> list[int]:
        """The blocks worth fetching: contiguous behind what the device and DRAM hold."""
        tiers, dram = self._tiers, self._tiers.dram
        assert dram is not None
        first = len(tiers.device.match(lookup.keys))
        runs: list[tuple[str, int]] = []
        for index in range(first, len(lookup.keys)):
            if dram.find(lookup.keys[index]) is not None:
                tier = "dram"
            elif index in present:
                tier = "redis"
            else:
                break
            if runs and runs[-1][0] == tier:
                runs[-1] = (tier, runs[-1][1] + 1)
            else:
                runs.append((tier, 1))
        tried = runs
        if self._late_loads >= _LATE_IN_A_ROW and not self._load_again.due(time.monotonic()):
            tried = list(takewhile(lambda run: run[0] == "dram", runs))
        kept = choose_load(
            tried,
            start_block=first,
            block_tokens=tiers.block_tokens,
            prompt_tokens=lookup.prompt_tokens,
            cost=tiers.cost,
        )
        if tried[kept:] and self._load_again.due(time.monotonic()):
            kept = len(runs)
        end = first + sum(blocks for _, blocks in runs[:kept])
        slower = [index for index in sorted(present) if index >= end]
        reach = first + sum(blocks for _, blocks in runs)
        for index in slower:
            lookup.misses[index] = Miss.LOAD_SLOWER if index < reach else Miss.AFTER_GAP
            tiers.count_misses(Tier.REDIS, lookup.misses[index])
        return [index for index in range(first, end) if dram.find(lookup.keys[index]) is None]

    def _fetch(self, lookup: Lookup, wanted: Sequence[int]) -> None:
        tiers, dram, redis = self._tiers, self._tiers.dram, self._tiers.redis
        assert dram is not None
        assert redis is not None
        room = min(len(wanted), dram.pool.available(lookup.tenant), self._landing_room())
        slots = dram.pool.take(room, lookup.tenant)
        for index in wanted[room:]:
            lookup.misses[index] = Miss.NO_ROOM
        tiers.count_misses(Tier.REDIS, Miss.NO_ROOM, len(wanted) - room)
        wanted = wanted[:room]
        if not wanted:
            lookup.settle()
            return
        self._landing_slots += len(slots)
        for index in wanted:
            self._incoming[lookup.keys[index].link] = []
        tiers.in_flight += 1
        start_token = wanted[0] * tiers.block_tokens
        redis.fetch(
            [
                (lookup.keys[index], dram.arena.payload(slot))
                for index, slot in zip(wanted, slots, strict=True)
            ],
            load_deadline_s(start_token, len(wanted) * tiers.block_tokens, tiers.cost),
            lambda fetched: tiers.mail.post(lambda: self._fetched(lookup, wanted, slots, fetched)),
        )

    def _fetched(
        self, lookup: Lookup, wanted: Sequence[int], slots: Sequence[int], fetched: Fetched
    ) -> None:
        tiers, dram = self._tiers, self._tiers.dram
        assert dram is not None
        tiers.in_flight -= 1
        loaded = 0
        for index, slot, problem in zip(wanted, slots, fetched.outcomes, strict=True):
            key = lookup.keys[index]
            if problem is None and not tiers.was_erased(key, lookup.erasure_mark):
                loaded += 1
                lookup.from_redis.add(key.link)
                if dram.pool.publish(slot, key, saving_s=tiers.saving_s(key)):
                    # one that was held since the search, and has lost its content to a flush
                    before = lookup.slots.pop(index, None)
                    lookup.slots[index] = slot
                    if before is None:
                        continue
                    slot = before
            elif problem is not None:
                lookup.misses[index] = problem
                tiers.count_misses(Tier.REDIS, problem)
                if problem not in (Miss.LATE, Miss.TIER_DOWN):
                    tiers.note_stored(key, None)
            self._landing_slots -= 1
            dram.release([slot])
        counters = tiers.counters[Tier.REDIS]
        counters.loads += loaded
        counters.load_s += fetched.seconds
        if Miss.LATE in fetched.outcomes:
            self._late_loads += 1
        elif loaded == len(wanted):
            self._late_loads = 0
            tiers.cost.observe_load("redis", loaded, fetched.seconds)
        lookup.settle()
        if lookup.closed:
            self.close(lookup)
        self._call_waiters(lookup, wanted, fetched.outcomes)

    def _call_waiters(
        self, lookup: Lookup, wanted: Sequence[int], outcomes: Sequence[Miss | None]
    ) -> None:
        """Whoever waited for these blocks on another prompt's account looks again; not in Redis,
        if that did not answer in time: it would cost each of them a deadline, one after another."""
        waiters = [
            waiter for index in wanted for waiter in self._incoming.pop(lookup.keys[index].link)
        ]
        silent = [
            (lookup.keys[index], outcome)
            for index, outcome in zip(wanted, outcomes, strict=True)
            if outcome in (Miss.LATE, Miss.TIER_DOWN)
        ]
        for waiter in waiters:
            waiter.settle()
            if waiter.closed:
                continue
            if not silent:
                self._search(waiter)
            for key, outcome in silent:
                index = key.start // self._tiers.block_tokens
                asked = index < len(waiter.keys) and waiter.keys[index] == key
                if asked and outcome is not None:
                    waiter.misses[index] = outcome
                    self._tiers.count_misses(Tier.REDIS, outcome)
