"""Who runs in the next step, on which pages.

One token budget per step, no prefill or decode modes: running sequences first, then waiting ones
while budget, slots and pages last. When pages run out the least urgent running sequence releases
its pages to the cache and waits again at its old place in line; nothing of it is lost.

A sequence whose KV is on its way up from a lower tier is passed by until it is there: waiting while
it is searched for, `loading` with its slot and pages while it is copied into them.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass

from cache.block import BlockKey
from cache.explanation import not_read
from cache.promotion import Found
from cache.report import CacheUse
from cache.tiered_cache import TieredCache
from engine.sequence import Sequence
from policies.scheduling import pick_victim, share_budget


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` of a sequence to compute, from `sequence.computed` on."""

    sequence: Sequence
    tokens: int

    @property
    def reaches_end(self) -> bool:
        """Whether the chunk ends at the last known token, so that a token can be sampled."""
        return self.sequence.computed + self.tokens == self.sequence.known


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
        self._computing: dict[bytes, Sequence] = {}  # block link -> the sequence computing it

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in line by its rank, and have its prompt searched for in every tier."""
        request = sequence.request
        if sequence.lookup is None and request.read_cache and request.chain_root is not None:
            keys, tenant = self._readable_keys(sequence), request.owner.tenant
            sequence.lookup = self._cache.look_up(keys, tenant, sequence.prompt_tokens)
        insort(self.waiting, sequence, key=lambda waiting: waiting.rank)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, in rank order, with pages for every one of their tokens.

        The sum of tokens is at most the step budget. Empty only if nothing can run.
        """
        preempted_before = self.preemptions
        short_of_pages = False
        shares = share_budget(self._step_tokens, [self._wanted(s) for s in self.running])
        chunks: list[Chunk] = []
        for sequence, share in zip(list(self.running), shares, strict=True):
            if not share or sequence.slot is None:
                continue
            # victims are the least urgent, hence at or after this one: chunks so far stay valid
            if self._make_room(sequence, share):
                chunks.append(Chunk(sequence, share))
            else:
                short_of_pages = True
        if not short_of_pages and self.preemptions == preempted_before:
            self._admit(chunks, self._step_tokens - sum(chunk.tokens for chunk in chunks))
        return chunks

    def commit(self, chunk: Chunk) -> None:
        """The chunk's KV is in the pages: count it and publish the blocks it filled."""
        sequence = chunk.sequence
        sequence.computed += chunk.tokens
        self._publish(sequence, sequence.computed)
        if sequence.computed >= sequence.prompt_tokens > sequence.computed - chunk.tokens:
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
            self.waiting.remove(sequence)

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        for sequence in list(self.waiting):
            if not budget or not self._free_slots:
                return
            if sequence.lookup is not None and sequence.lookup.pending:
                continue
            found = self._find(sequence)
            if self._shall_wait_for_leader(sequence, len(found.pages) + len(found.slots)):
                continue
            if not self._fits(sequence, found.pages):
                return  # strict order: nobody overtakes a sequence that waits for pages
            self.waiting.remove(sequence)
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

    def _shall_wait_for_leader(self, sequence: Sequence, hits: int) -> bool:
        """Whether the first missing block is being computed, or loaded, for another sequence:
        waiting for it beats doing the same twice."""
        keys = self._readable_keys(sequence)
        return hits < len(keys) and keys[hits].link in self._computing

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
        for key in keys[len(found.pages) :]:
            self._computing.setdefault(key.link, sequence)

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
        insort(self.running, sequence, key=lambda running: running.rank)
        lookup = sequence.lookup
        if sequence.cache_use is None:  # counted once, whatever happens later
            if lookup is None:
                runs = not_read(self._block_tokens, sequence.prompt_tokens)
                sequence.cache_use = CacheUse(self._block_tokens, runs=runs)
            else:
                sequence.cache_use = self._cache.use(
                    lookup,
                    self._readable_keys(sequence),
                    sequence.pages,
                    loaded,
                    sequence.computed,
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
            self._computing.pop(key.link, None)
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
        for key in sequence.block_keys(self._block_tokens, sequence.known):
            if self._computing.get(key.link) is sequence:
                del self._computing[key.link]
        self.pool.release(sequence.pages)
        sequence.pages = []
        assert sequence.slot is not None
        self._free_slots.append(sequence.slot)
        sequence.slot = None
