"""Between sequences and the prompt cache: what of a sequence is found there, the pages that it
holds, and the blocks that it leaves for others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cache.block import BlockKey
from cache.explanation import not_read
from cache.promotion import Found
from cache.report import CacheUse
from cache.tiered_cache import TieredCache
from engine.block_leaders import BlockLeaders
from engine.sequence import Sequence


class SequencePages:
    """The pages of all sequences. Step-loop thread only."""

    def __init__(self, cache: TieredCache, block_tokens: int) -> None:
        self.leaders = BlockLeaders()
        self._cache = cache
        self._pool = cache.device
        self._block_tokens = block_tokens

    @property
    def copies_down(self) -> bool:
        """Whether copies to a lower tier hold pages that nobody else may be using."""
        return self._cache.copies_down

    def search(self, sequence: Sequence) -> int:
        """Search for the sequence in every tier, once. How many of its first blocks are here."""
        request = sequence.request
        keys = self._readable_keys(sequence)
        if sequence.lookup is None and request.read_cache and request.chain_root is not None:
            sequence.lookup = self._cache.look_up(keys, request.owner.tenant, sequence.known)
        return self._cache.blocks_held(keys)

    def close_search(self, sequence: Sequence) -> None:
        """Nothing is looked for any more. Idempotent."""
        if sequence.lookup is not None:
            self._cache.close_lookup(sequence.lookup)

    def find(self, sequence: Sequence) -> Found:
        """What the sequence could start from now."""
        keys = self._readable_keys(sequence)
        if not keys or sequence.lookup is None:
            return Found([], [])
        return self._cache.find(sequence.lookup, keys)

    def reach(self, sequence: Sequence, hits: int) -> int:
        """How many of its first blocks it need not compute: `hits` that are here, and those behind
        them that others are filling."""
        return self.leaders.reach(self._readable_keys(sequence), hits)

    def follows(self, sequence: Sequence, hits: int) -> bool:
        """Whether somebody is filling the first block behind `hits`, so that waiting is better."""
        return self.leaders.keeps_waiting(sequence, self._readable_keys(sequence), hits)

    def fits(self, sequence: Sequence, hits: list[int], reserve: int) -> bool:
        """Whether every known token has a page once `hits` are held, and `reserve` are left."""
        missing = -(-sequence.known // self._block_tokens) - len(hits)
        revived = self._pool.evictable_among(hits)
        return missing + revived + reserve <= self._available(sequence)

    def missing(self, sequences: Iterable[Sequence]) -> int:
        """Pages that those who run will still take for what is known of them."""
        return sum(
            max(0, -(-each.known // self._block_tokens) - len(each.pages)) for each in sequences
        )

    def hold(self, sequence: Sequence, found: Found) -> None:
        """Hold the pages that were found. The sequence is going to fill the blocks behind them."""
        sequence.pages = found.pages[: (sequence.known - 1) // self._block_tokens]
        self._pool.hold(sequence.pages)
        keys = sequence.block_keys(self._block_tokens, sequence.known)
        self.leaders.lead(sequence, keys[len(found.pages) :])

    def load(self, sequence: Sequence, found: Found, done: Callable[[int], None]) -> None:
        """Have what lies in DRAM copied into more pages. `done(index)` comes when that is over: the
        pages from `index` on are new."""
        pages = self._pool.take(len(found.slots), sequence.request.owner.tenant)
        sequence.pages += pages
        on_device = len(found.pages)

        def copied(worked: bool) -> None:
            if not worked:
                del sequence.pages[on_device:]
                self._pool.release(pages)
            done(on_device)

        self._cache.load(found.slots, pages, copied)

    def start(self, sequence: Sequence, *, loaded_from: int) -> None:
        """Run from the pages that are held; those from `loaded_from` on are not published yet."""
        sequence.computed = min(len(sequence.pages) * self._block_tokens, sequence.known - 1)
        sequence.published = loaded_from
        self.publish(sequence, sequence.computed)
        loaded = range(loaded_from, len(sequence.pages))
        self._reuse_tail(sequence)
        if sequence.cache_use is None:  # counted once, whatever happens later
            sequence.cache_use = self._count_use(sequence, loaded)
        self.close_search(sequence)

    def publish(self, sequence: Sequence, tokens: int) -> None:
        """Let others find the sequence's full blocks within its first `tokens` tokens."""
        keys = sequence.block_keys(self._block_tokens, tokens)
        for index in range(sequence.published, len(keys)):
            key = keys[index]
            if not sequence.erased:
                self._cache.publish(sequence.pages[index], key, sequence.request.retention)
            self.leaders.filled(key)
        sequence.published = len(keys)

    def unpublish(self, sequence: Sequence) -> None:
        """Let nobody find the sequence's blocks any more, but for those of a shared prefix, which
        others have found good."""
        full = sequence.published * self._block_tokens
        keys = sequence.block_keys(self._block_tokens, full)
        self._cache.forget([key for key in keys if key.owner == sequence.request.owner])

    def prompt_done(self, sequence: Sequence) -> None:
        """All of the prompt is computed."""
        keys = sequence.block_keys(self._block_tokens, sequence.prompt_tokens)
        self._cache.prompt_done(keys, sequence.pages, sequence.request.retention)

    def lacking(self, sequence: Sequence, tokens: int) -> int:
        """Pages for `tokens` more that cannot be had; not more than 0: they can."""
        return self._needed(sequence, tokens) - self._available(sequence)

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Take pages for `tokens` more, of which none is lacking."""
        needed = self._needed(sequence, tokens)
        if needed > 0:
            sequence.pages += self._pool.take(needed, sequence.request.owner.tenant)

    def leave(self, sequence: Sequence) -> None:
        """It ends: its blocks may be written down before its pages are released."""
        self._cache.sequence_done(sequence.pages[: sequence.published])
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give its pages to the cache; others need not wait for it to fill them."""
        self.leaders.leave(sequence, sequence.block_keys(self._block_tokens, sequence.known))
        self._pool.release(sequence.pages)
        sequence.pages = []

    def _needed(self, sequence: Sequence, tokens: int) -> int:
        return -(-(sequence.computed + tokens) // self._block_tokens) - len(sequence.pages)

    def _available(self, sequence: Sequence) -> int:
        return self._pool.available(sequence.request.owner.tenant)

    def _readable_keys(self, sequence: Sequence) -> list[BlockKey]:
        """Of the blocks that may be taken from the cache. Where the last one is full, all of it but
        the last known token, which is always computed."""
        if not sequence.request.read_cache:
            return []
        return sequence.block_keys(self._block_tokens, sequence.known)

    def _count_use(self, sequence: Sequence, loaded: range) -> CacheUse:
        lookup = sequence.lookup
        if lookup is None:
            runs = not_read(self._block_tokens, sequence.prompt_tokens)
            return CacheUse(self._block_tokens, runs=runs)
        return self._cache.use(
            lookup,
            self._readable_keys(sequence)[: sequence.prompt_tokens // self._block_tokens],
            sequence.pages[: -(-sequence.prompt_tokens // self._block_tokens)],
            loaded,
            min(sequence.computed, sequence.prompt_tokens),
            sequence.prompt_tokens,
            sequence.request.retention,
        )

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
        self._pool.hold([page])
        try:
            if self._available(sequence) > 0:
                own = self._pool.take(1, sequence.request.owner.tenant)
                self._cache.copy_page(page, own[0])
                sequence.pages += own
                sequence.computed = last
        finally:
            self._pool.release([page])

    def _find_tail(self, sequence: Sequence, first: int, last: int) -> int | None:
        keys = sequence.block_keys(self._block_tokens, last + 1)
        if (
            len(keys) * self._block_tokens > last
            and (page := self._pool.find(keys[-1])) is not None
        ):
            return page
        parent = sequence.parent_link(self._block_tokens)
        if parent is None:
            return None
        tail = sequence.token_ids(first, last).astype("<u4", copy=False).tobytes()
        return self._cache.find_beginning(parent, tail)
