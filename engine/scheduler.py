"""Who runs in the next step, on which pages.

One token budget per step, no prefill or decode modes: running sequences first, then waiting ones
while budget, slots and pages last. When pages run out the least urgent running sequence releases
its pages to the cache and waits again at its old place in line; nothing of it is lost.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass

from cache.device_pool import DevicePool
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
        pool: DevicePool,
        *,
        block_tokens: int,
        step_tokens: int,
        max_running: int,
        prompt_logprob_tokens: int,
    ) -> None:
        self.pool = pool
        self.preemptions = 0
        self.running: list[Sequence] = []  # in rank order
        self.waiting: list[Sequence] = []  # in rank order
        self._block_tokens = block_tokens
        self._step_tokens = step_tokens
        self._prompt_logprob_tokens = prompt_logprob_tokens
        self._free_slots = deque(range(max_running))
        self._computing: dict[bytes, Sequence] = {}  # block link -> the sequence computing it

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in line by its rank."""
        insort(self.waiting, sequence, key=lambda waiting: waiting.rank)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, in rank order, with pages for every one of their tokens.

        The sum of tokens is at most the step budget. Empty only if nothing can run.
        """
        preempted_before = self.preemptions
        shares = share_budget(self._step_tokens, [self._wanted(s) for s in self.running])
        chunks: list[Chunk] = []
        for sequence, share in zip(list(self.running), shares, strict=True):
            # victims are the least urgent, hence at or after this one: chunks so far stay valid
            if share and sequence.slot is not None and self._make_room(sequence, share):
                chunks.append(Chunk(sequence, share))
        if self.preemptions == preempted_before:
            self._admit(chunks, self._step_tokens - sum(chunk.tokens for chunk in chunks))
        return chunks

    def commit(self, chunk: Chunk) -> None:
        """The chunk's KV is in the pages: count it and publish the blocks it filled."""
        sequence = chunk.sequence
        sequence.computed += chunk.tokens
        keys = sequence.block_keys(self._block_tokens, sequence.computed)
        for index in range(sequence.published, len(keys)):
            self.pool.publish(sequence.pages[index], keys[index])
            self._computing.pop(keys[index].link, None)
        sequence.published = len(keys)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and release what it holds. Idempotent."""
        if sequence.slot is not None:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        for sequence in list(self.waiting):
            if not budget or not self._free_slots:
                return
            keys = sequence.block_keys(self._block_tokens, sequence.known - 1)
            hits = self.pool.match(keys) if sequence.request.read_cache else []
            if self._shall_wait_for_leader(sequence, len(hits)):
                continue
            if not self._fits(sequence, hits):
                return  # strict order: nobody overtakes a sequence that waits for pages
            self.waiting.remove(sequence)
            self._start(sequence, hits)
            share = min(self._wanted(sequence), budget)
            if not self._make_room(sequence, share):  # cannot be: _fits counted the pages
                raise RuntimeError("an admitted sequence found no pages")
            chunks.append(Chunk(sequence, share))
            budget -= share

    def _shall_wait_for_leader(self, sequence: Sequence, hits: int) -> bool:
        """Whether the first missing block is being computed by a running sequence: waiting for it
        beats computing the same prefix twice in one batch."""
        if not sequence.request.read_cache:
            return False
        keys = sequence.block_keys(self._block_tokens, sequence.known - 1)
        return hits < len(keys) and keys[hits].link in self._computing

    def _fits(self, sequence: Sequence, hits: list[int]) -> bool:
        """Whether every known token, and one more block, has a page once `hits` are held."""
        missing = -(-sequence.known // self._block_tokens) - len(hits)
        revived = self.pool.evictable_among(hits)
        reserve = 1 if self.running else 0
        return missing + revived + reserve <= self.pool.available()

    def _start(self, sequence: Sequence, hits: list[int]) -> None:
        self.pool.hold(hits)
        sequence.pages = list(hits)
        sequence.computed = len(hits) * self._block_tokens
        sequence.published = len(hits)
        if sequence.cached_tokens is None:  # counted once, whatever happens later
            sequence.cached_tokens = sequence.computed
        sequence.slot = self._free_slots.popleft()
        insort(self.running, sequence, key=lambda running: running.rank)
        keys = sequence.block_keys(self._block_tokens, sequence.known - 1)
        for key in keys[len(hits) :]:
            self._computing.setdefault(key.link, sequence)

    def _wanted(self, sequence: Sequence) -> int:
        wanted = sequence.known - sequence.computed
        if sequence.request.params.prompt_logprobs is not None and not sequence.generated:
            # every row's logits are needed: keep [rows, vocab] small
            wanted = min(wanted, self._prompt_logprob_tokens)
        return wanted

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Give the sequence pages for `tokens` more; preempts others, or itself (then False)."""
        needed = -(-(sequence.computed + tokens) // self._block_tokens) - len(sequence.pages)
        while needed > self.pool.available():
            victim = self.running[pick_victim([running.rank for running in self.running])]
            self._preempt(victim)
            if victim is sequence:
                return False
        if needed > 0:
            sequence.pages += self.pool.take(needed)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.forget_progress()
        self.preemptions += 1
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        for key in sequence.block_keys(self._block_tokens, sequence.known - 1):
            if self._computing.get(key.link) is sequence:
                del self._computing[key.link]
        self.pool.release(sequence.pages)
        sequence.pages = []
        assert sequence.slot is not None
        self._free_slots.append(sequence.slot)
        sequence.slot = None
