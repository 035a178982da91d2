"""Who runs in the next step, on which pages.

One token budget per step, no prefill or decode modes: running sequences first, then waiting ones
while budget, slots and pages last. When pages run out the least urgent running sequence releases
its pages to the cache and waits again at its old place in line; nothing of it is lost. It does so,
too, for a waiting sequence of a more urgent priority, whose prefill comes before its own.

A sequence whose KV is on its way up from a lower tier is passed by until it is there: waiting while
it is searched for, `loading` with its slot and pages while it is copied into them.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from cache.block import BlockKey
from cache.explanation import not_read
from cache.promotion import Found
from cache.report import CacheUse
from cache.tiered_cache import TieredCache
from engine.block_leaders import BlockLeaders
from engine.sequence import Sequence
from policies.scheduling import Rank, pick_victim, share_budget


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` of a sequence to compute, from `sequence.computed` on."""

    sequence: Sequence
    tokens: int

    @property
    def reaches_end(self) -> bool:
        """Whether the chunk ends at the last known token, so that a token can be sampled."""
        return self.sequence.computed + self.tokens == self.sequence.known


class Load(NamedTuple):
    """What is here to be done; see `EngineStats`."""

    pending_tokens: int
    context_tokens: int


class Scheduler:
    """Owns the queue, the running set, the slots and the pool. Step-loop thread only."""

    def __init__(
        self,
        cache: TieredCache,
        *,
        block_tokens: int,
        step_tokens: int,
        max_running: int,
        prompt_logprob_tokens: int,
    ) -> None:
        self.pool = cache.device
        self.preemptions = 0
        self.running: list[Sequence] = []  # in rank order
        self.waiting: list[Sequence] = []  # in rank order
        self.loading: list[Sequence] = []
        self._cache = cache
        self._block_tokens = block_tokens
        self._step_tokens = step_tokens
        self._prompt_logprob_tokens = prompt_logprob_tokens
        self._free_slots = deque(range(max_running))
        self._leaders = BlockLeaders()
        self._waiting_tokens = 0  # the sum of `uncached` over those who wait

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in line by its rank, and have its prompt searched for in every tier."""
        request = sequence.request
        if sequence.lookup is None and request.read_cache and request.chain_root is not None:
            keys, tenant = self._readable_keys(sequence), request.owner.tenant
            sequence.lookup = self._cache.look_up(keys, tenant, sequence.known)
        insort(self.waiting, sequence, key=_rank)
        self._foresee(sequence, self._cache.blocks_held(self._readable_keys(sequence)))

    def load(self) -> Load:
        """Exact between two steps. Of those who wait, what a lower tier will turn out to have, and
        what others will have computed until then, counts as theirs to compute."""
        pending, context = self._waiting_tokens, 0
        for sequence in self.running:
            computed = sequence.computed
            context += computed
            if computed < sequence.prefill_end:
                pending += sequence.prefill_end - computed
        for sequence in self.loading:
            loaded = len(sequence.pages) * self._block_tokens
            pending += max(1, sequence.prefill_end - loaded)
        return Load(pending, context)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, in rank order, with pages for every one of their tokens.

        The sum of tokens is at most the step budget. Empty only if nothing can run.
        """
        preempted_before = self.preemptions
        short_of_pages = False
        running = list(self.running)
        wanted = [self._wanted(sequence) for sequence in running]
        shares = share_budget(self._step_tokens, wanted)
        chunks: list[Chunk] = []
        let_in: int | None = None
        overtaken = bool(running) and self._is_overtaken(running[-1].rank.priority)
        for index, sequence in enumerate(running):
            if overtaken and not short_of_pages:
                priority = sequence.rank.priority
                if priority != let_in and self._is_overtaken(priority):
                    let_in = priority
                    shares[index:] = self._let_urgent_in(chunks, running[index:], wanted[index:])
            share = shares[index]
            if not share or sequence.slot is None:
                continue
            # victims are the least urgent, hence at or after this one: chunks so far stay valid
            if self._make_room(sequence, share):
                chunks.append(Chunk(sequence, share))
            else:
                short_of_pages = True
        if not short_of_pages and self.preemptions == preempted_before:
            self._admit(chunks, self._left_of(chunks))
        if self._leaders.take_urged():  # not before: chunks and victims go by the order of ranks
            self.running.sort(key=_rank)
            self.waiting.sort(key=_rank)  # a leader may have been preempted since
        return chunks

    def commit(self, chunk: Chunk) -> None:
        """The chunk's KV is in the pages: count it and publish the blocks it filled."""
        sequence = chunk.sequence
        sequence.computed += chunk.tokens
        self._publish(sequence, sequence.computed)
        prefilled = sequence.prompt_tokens + sequence.given
        if sequence.computed >= prefilled > sequence.computed - chunk.tokens:
            keys = sequence.block_keys(self._block_tokens, sequence.prompt_tokens)
            self._cache.prompt_done(keys, sequence.pages, sequence.request.retention)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and release what it holds. Idempotent."""
        if sequence.lookup is not None:
            self._cache.close_lookup(sequence.lookup)
        if sequence in self.loading:
            sequence.leaving = True  # its pages are being written: they are released after that
        elif sequence.slot is not None:
            self.running.remove(sequence)
            self._cache.sequence_done(sequence.pages[: sequence.published])
            self._release(sequence)
        elif sequence in self.waiting:
            self._leave_line(sequence)

    def _admit(self, chunks: list[Chunk], budget: int, before: int | None = None) -> None:
        """Let waiting sequences run while there is room for them; with `before` those of a priority
        before it, for whom running ones of that priority or behind make room."""
        for sequence in list(self.waiting):
            if before is not None and sequence.rank.priority >= before:
                return
            if budget <= 0 or (not self._free_slots and before is None):
                return
            if sequence.lookup is not None and sequence.lookup.pending:
                continue
            found = self._find(sequence)
            hits = len(found.pages) + len(found.slots)
            follows = self._leaders.keeps_waiting(sequence, self._readable_keys(sequence), hits)
            if not follows or hits >= sequence.reach:
                self._foresee(sequence, hits)
            if follows:
                continue
            if before is not None:
                found = self._push_aside(sequence, found, before)
            if not self._free_slots or not self._fits(sequence, found.pages):
                return  # strict order: nobody overtakes a sequence that waits for pages
            self._leave_line(sequence)
            self._take_slot(sequence, found)
            if found.slots:
                self._load(sequence, found)
                continue
            self._start(sequence, loaded_from=len(sequence.pages))
            share = min(self._wanted(sequence), budget)
            if not self._make_room(sequence, share):  # cannot be: _fits counted the pages
                raise RuntimeError("an admitted sequence found no pages")
            chunks.append(Chunk(sequence, share))
            budget -= share

    def _is_overtaken(self, priority: int) -> bool:
        """Whether somebody of a more urgent priority waits."""
        return bool(self.waiting) and self.waiting[0].rank.priority < priority

    def _let_urgent_in(
        self, chunks: list[Chunk], behind: list[Sequence], wanted: list[int]
    ) -> list[int]:
        """Let in who is more urgent than all of `behind`, who `wanted` so many tokens each: their
        prefills come later, their decodes all the same. Returns the shares that are left for them.
        """
        budget = self._left_of(chunks) - wanted.count(1)
        self._admit(chunks, budget, before=behind[0].rank.priority)
        still = [
            0 if sequence.slot is None else tokens
            for sequence, tokens in zip(behind, wanted, strict=True)
        ]
        return share_budget(self._left_of(chunks), still)

    def _left_of(self, chunks: list[Chunk]) -> int:
        return self._step_tokens - sum(chunk.tokens for chunk in chunks)

    def _push_aside(self, sequence: Sequence, found: Found, before: int) -> Found:
        """Preempt running sequences of the priority `before` and behind until there is a slot and
        pages for this one, or none are left. Returns what it can start from then: nobody held what
        was found before."""
        while not self._free_slots or not self._fits(sequence, found.pages):
            last = self.running[-1] if self.running else None
            if last is None or last.rank.priority < before:
                break
            self._preempt(last)
            found = self._find(sequence)
        return found

    def _leave_line(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self._waiting_tokens -= sequence.uncached
        sequence.reach = sequence.uncached = 0

    def _foresee(self, sequence: Sequence, hits: int) -> None:
        """What a waiting sequence will compute, given that its first `hits` blocks are there."""
        reach = self._leaders.reach(self._readable_keys(sequence), hits)
        uncached = max(1, sequence.known - reach * self._block_tokens)
        self._waiting_tokens += uncached - sequence.uncached
        sequence.reach, sequence.uncached = reach, uncached

    def _readable_keys(self, sequence: Sequence) -> list[BlockKey]:
        """Of the blocks that may be taken from the cache. Where the last one is full, all of it but
        the last known token, which is always computed."""
        if not sequence.request.read_cache:
            return []
        return sequence.block_keys(self._block_tokens, sequence.known)

    def _find(self, sequence: Sequence) -> Found:
        keys = self._readable_keys(sequence)
        if not keys or sequence.lookup is None:
            return Found([], [])
        return self._cache.find(sequence.lookup, keys)

    def _fits(self, sequence: Sequence, hits: list[int]) -> bool:
        """Whether every known token, and one more block, has a page once `hits` are held."""
        missing = -(-sequence.known // self._block_tokens) - len(hits)
        revived = self.pool.evictable_among(hits)
        reserve = 1 if self.running or self.loading else 0
        return missing + revived + reserve <= self._available(sequence)

    def _take_slot(self, sequence: Sequence, found: Found) -> None:
        sequence.pages = found.pages[: (sequence.known - 1) // self._block_tokens]
        self.pool.hold(sequence.pages)
        sequence.slot = self._free_slots.popleft()
        keys = sequence.block_keys(self._block_tokens, sequence.known)
        self._leaders.lead(sequence, keys[len(found.pages) :])

    def _load(self, sequence: Sequence, found: Found) -> None:
        """Have what lies in DRAM copied into pages; the sequence runs when it is there."""
        pages = self.pool.take(len(found.slots), sequence.request.owner.tenant)
        sequence.pages += pages
        self.loading.append(sequence)
        on_device = len(found.pages)

        def done(worked: bool) -> None:
            self.loading.remove(sequence)
            if not worked:
                del sequence.pages[on_device:]
                self.pool.release(pages)
            if sequence.leaving:
                self._release(sequence)
                return
            self._start(sequence, loaded_from=on_device)

        self._cache.load(found.slots, pages, done)

    def _start(self, sequence: Sequence, *, loaded_from: int) -> None:
        """Run a sequence from the pages that it has; those from `loaded_from` on are not published
        yet."""
        sequence.computed = min(len(sequence.pages) * self._block_tokens, sequence.known - 1)
        sequence.published = loaded_from
        self._publish(sequence, sequence.computed)
        loaded = range(loaded_from, len(sequence.pages))
        self._reuse_tail(sequence)
        insort(self.running, sequence, key=_rank)
        lookup = sequence.lookup
        if sequence.cache_use is None:  # counted once, whatever happens later
            if lookup is None:
                runs = not_read(self._block_tokens, sequence.prompt_tokens)
                sequence.cache_use = CacheUse(self._block_tokens, runs=runs)
            else:
                sequence.cache_use = self._cache.use(
                    lookup,
                    self._readable_keys(sequence)[: sequence.prompt_tokens // self._block_tokens],
                    sequence.pages[: -(-sequence.prompt_tokens // self._block_tokens)],
                    loaded,
                    min(sequence.computed, sequence.prompt_tokens),
                    sequence.prompt_tokens,
                    sequence.request.retention,
                )
        if lookup is not None:
            self._cache.close_lookup(lookup)

    def _reuse_tail(self, sequence: Sequence) -> None:
        """Copy what the device has of the last block: the beginning of one that goes on from here,
        written by the same prompt before. A page of the sequence's own, since it is written to."""
        first, last = sequence.computed, sequence.known - 1
        inside = 0 < last - first < self._block_tokens and not first % self._block_tokens
        if not inside or not sequence.request.read_cache or sequence.erased:
            return
        page = self._find_tail(sequence, first, last)
        if page is None:
            return
        self.pool.hold([page])
        try:
            if self._available(sequence) > 0:
                own = self.pool.take(1, sequence.request.owner.tenant)
                self._cache.copy_page(page, own[0])
                sequence.pages += own
                sequence.computed = last
        finally:
            self.pool.release([page])

    def _find_tail(self, sequence: Sequence, first: int, last: int) -> int | None:
        keys = sequence.block_keys(self._block_tokens, last + 1)
        if len(keys) * self._block_tokens > last and (page := self.pool.find(keys[-1])) is not None:
            return page
        parent = sequence.parent_link(self._block_tokens)
        if parent is None:
            return None
        tail = sequence.token_ids(first, last).astype("<u4", copy=False).tobytes()
        return self._cache.find_beginning(parent, tail)

    def _publish(self, sequence: Sequence, tokens: int) -> None:
        """Let others find the sequence's full blocks within its first `tokens` tokens."""
        keys = sequence.block_keys(self._block_tokens, tokens)
        for index in range(sequence.published, len(keys)):
            key = keys[index]
            if not sequence.erased:
                self._cache.publish(sequence.pages[index], key, sequence.request.retention)
            self._leaders.filled(key)
        sequence.published = len(keys)

    def _wanted(self, sequence: Sequence) -> int:
        wanted = sequence.known - sequence.computed
        if sequence.request.params.prompt_logprobs is not None and not sequence.generated:
            # every row's logits are needed: keep [rows, vocab] small
            wanted = min(wanted, self._prompt_logprob_tokens)
        return wanted

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Give the sequence pages for `tokens` more; preempts others for it.

        False if that is not enough: then it waits for pages that transfers hold, or, if there are
        none, is preempted itself.
        """
        needed = -(-(sequence.computed + tokens) // self._block_tokens) - len(sequence.pages)
        while needed > self._available(sequence):
            victim = self.running[pick_victim([running.rank for running in self.running])]
            if victim is sequence and (self.loading or self._cache.copies_down):
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        if needed > 0:
            sequence.pages += self.pool.take(needed, sequence.request.owner.tenant)
        return True

    def _available(self, sequence: Sequence) -> int:
        return self.pool.available(sequence.request.owner.tenant)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.forget_progress()
        self.preemptions += 1
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._leaders.leave(sequence, sequence.block_keys(self._block_tokens, sequence.known))
        self.pool.release(sequence.pages)
        sequence.pages = []
        assert sequence.slot is not None
        self._free_slots.append(sequence.slot)
        sequence.slot = None


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank
