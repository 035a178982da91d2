"""A scheduler over three tiers without a model: every block's bytes are a function of its key.

Transfers and Redis wait until the test lets them go on, in any order and with any outcome.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from cache.block import BlockKey, Owner, Tier
from cache.block_pool import BlockPool
from cache.hashing import owner_tags
from cache.host_arena import HostArena
from cache.redis_store import Fetched, Probe
from cache.report import Miss
from cache.sightings import Sightings
from cache.tiered_cache import TieredCache
from cache.tiers import DramTier, Tiers
from engine.request import EngineRequest, Retention
from engine.sampling_params import SamplingParams
from engine.scheduler import Chunk, Scheduler
from engine.sequence import Sequence as EngineSequence
from policies.cost import CostModel
from tests.cache.event_mirror import Mirror

BLOCK_TOKENS = 16
BLOCK_BYTES = 64
HEADER_BYTES = 64
SECRET = b"stage"


def content(key: BlockKey) -> bytes:
    """What a page must hold where `key` is published: depends on the whole prefix and its owner."""
    return hashlib.sha512(key.link + key.token_bytes).digest()


def owner(tenant: str) -> Owner:
    return owner_tags(SECRET, tenant, None)


@dataclass
class ManualCopier:
    """Copies when told to."""

    pages: torch.Tensor
    arena: HostArena
    queue: list[Callable[[], None]] = field(default_factory=list)
    fail_next: bool = False

    def download(self, moves: Sequence[tuple[int, int]], done: Callable[..., None]) -> None:
        self.queue.append(lambda: self._run(moves, done, down=True))

    def upload(self, moves: Sequence[tuple[int, int]], done: Callable[..., None]) -> None:
        self.queue.append(lambda: self._run(moves, done, down=False))

    def _run(self, moves, done, *, down: bool) -> None:
        if self.fail_next:
            self.fail_next = False
            done(None)
            return
        for source, target in moves:
            if down:
                self.arena.payloads[target].copy_(self.pages[source])
            else:
                self.pages[target].copy_(self.arena.payloads[source])
        done(1e-5 * len(moves))

    def step(self, index: int = 0) -> None:
        if self.queue:
            self.queue.pop(index % len(self.queue))()

    def close(self) -> None:
        while self.queue:
            self.step()


@dataclass
class FakeRedis:
    """A dict under the interface of a `RedisTier`."""

    values: dict[bytes, tuple[BlockKey, bytes]] = field(default_factory=dict)
    queue: list[Callable[[], None]] = field(default_factory=list)
    up: bool = True
    value_bytes: int = BLOCK_BYTES
    corrupt: set[bytes] = field(default_factory=set)
    late: bool = False
    ttl_s: float = 1e6
    sent: int = 0
    asked: int = 0
    server_lives: int = 1

    def probe(self, keys, done) -> None:
        self.asked += 1

        def answer() -> None:
            if not self.up:
                done(Probe(present=(), failed=Miss.TIER_DOWN))
            else:
                done(Probe(present=tuple(key.link in self.values for key in keys), failed=None))

        self.queue.append(answer)

    def fetch(self, blocks, deadline_s, done, part=None) -> None:
        assert deadline_s > 0

        def answer() -> None:
            outcomes = []
            for key, buffer in blocks:
                stored = self.values.get(key.link)
                if not self.up:
                    outcomes.append(Miss.TIER_DOWN)
                elif self.late:
                    outcomes.append(Miss.LATE)
                elif stored is None:
                    outcomes.append(Miss.EVICTED)
                elif key.link in self.corrupt:
                    outcomes.append(Miss.CORRUPT)
                    del self.values[key.link]
                elif stored[0] != key:
                    outcomes.append(Miss.FOREIGN)
                else:
                    buffer[:] = stored[1]
                    outcomes.append(None)
            seconds = deadline_s if Miss.LATE in outcomes else 1e-5
            done(Fetched(outcomes=tuple(outcomes), seconds=seconds))

        self.queue.append(answer)

    def store(self, blocks, done, ttl_s=None) -> bool:
        if not self.up or len(self.queue) > 50:
            return False

        self.sent += len(blocks)

        def answer() -> None:
            for key, value in blocks:
                if self.up:
                    self.values[key.link] = (key, bytes(value[HEADER_BYTES:]))
            done(tuple(self.up for _ in blocks))

        self.queue.append(answer)
        return True

    def erase(self, tenant, scope):
        for link, (key, _) in list(self.values.items()):
            if tenant in (None, key.owner.tenant) and scope in (None, key.owner.scope):
                del self.values[link]
        return

    def set_quotas(self, quotas) -> None:
        self.quotas = quotas

    def step(self, index: int = 0) -> None:
        if self.queue:
            self.queue.pop(index % len(self.queue))()


class TierStage:
    """`run` computes a prompt to its end, checking every page that a sequence starts from."""

    def __init__(
        self,
        *,
        pages: int = 12,
        slots: int = 16,
        max_running: int = 3,
        step_tokens: int = 64,
        redis: bool = True,
        keeps: bool = True,
        write_through: bool = False,
    ) -> None:
        self.pages = torch.zeros(pages, BLOCK_BYTES, dtype=torch.uint8)
        arena = HostArena(slots, BLOCK_BYTES, header_bytes=HEADER_BYTES, pinned=False)
        self.copier = ManualCopier(self.pages, arena)
        self.redis = FakeRedis()
        cost = CostModel(
            token_flops=1e9, weight_bytes=1e9, kv_token_bytes=4.0, block_bytes=BLOCK_BYTES
        )
        self.dram = DramTier(BlockPool(slots), arena, self.copier, keeps)
        self.tiers = Tiers(
            BlockPool(pages),
            self.dram,
            self.redis if redis else None,  # type: ignore[arg-type]  # the same interface
            cost=cost,
            sightings=Sightings(),
            block_tokens=BLOCK_TOKENS,
            block_bytes=BLOCK_BYTES,
            copy_page=lambda source, target: self.pages[target].copy_(self.pages[source]),
            wake=lambda: None,
        )
        self.cache = TieredCache(self.tiers, ahead=4, write_through=write_through)
        self.scheduler = Scheduler(
            self.cache,
            block_tokens=BLOCK_TOKENS,
            step_tokens=step_tokens,
            max_running=max_running,
            prompt_logprob_tokens=64,
        )
        self.told = Mirror()
        self.sequences: dict[str, EngineSequence] = {}
        self.done: dict[str, EngineSequence] = {}
        self._started: set[str] = set()
        self._arrivals = 0

    def submit(
        self,
        name: str,
        prompt: list[int],
        *,
        tenant: str = "a",
        max_tokens: int = 1,
        priority: int = 0,
        given: int = 0,
        retention: tuple[Retention, ...] = (),
        flow: bytes = b"",
        weight: float = 1.0,
        deadline_s: float | None = None,
        tpot_s: float | None = None,
    ) -> EngineSequence:
        """`given` tokens of the answer were generated elsewhere."""
        request = EngineRequest(
            name,
            prompt,
            SamplingParams(max_tokens=max_tokens, temperature=0.0),
            chain_root=hashlib.md5(tenant.encode()).digest(),
            priority=priority,
            owner=owner(tenant),
            retention=retention,
            generated_token_ids=(1,) * given,
            flow=flow,
            weight=weight,
            deadline_s=deadline_s,
            tpot_s=tpot_s,
        )
        sequence = self.sequences[name] = EngineSequence(request, self._arrivals)
        self._arrivals += 1
        self.scheduler.add(sequence)
        return sequence

    def abort(self, name: str) -> None:
        self.scheduler.remove(self.sequences.pop(name))

    def step(self, beside: Callable[[list[Chunk]], None] | None = None) -> list[Chunk]:
        """One step of the loop, with a model that writes each block's bytes when it is full.

        It is put aside for what `beside` does, if that is given and the step is not empty. Of those
        who have gone on then, what is left of the step writes once more where their tokens lay.
        """
        self.cache.settle()
        chunks = self.scheduler.schedule()
        self._check_starts()
        if beside is not None and chunks:
            begun = [
                (chunk, chunk.sequence.computed, list(chunk.sequence.pages)) for chunk in chunks
            ]
            with self.scheduler.put_aside(chunks):
                beside(chunks)
                for chunk, computed, pages in begun:
                    self._write(chunk.sequence, pages, computed, computed + chunk.tokens)
            chunks = [chunk for chunk, computed, _ in begun if chunk.sequence.computed == computed]
        self._compute(chunks)
        self.cache.maintain()
        self.listen()
        return chunks

    def step_beside(self, priority: int, tokens: int) -> list[Chunk]:
        """One step while another one lies aside."""
        self.cache.settle()
        chunks = self.scheduler.schedule_beside(priority, tokens)
        self._check_starts()
        self._compute(chunks)
        self.cache.maintain()
        return chunks

    def _check_starts(self) -> None:
        for sequence in self.scheduler.running:
            if sequence.request.request_id not in self._started:
                self._started.add(sequence.request.request_id)
                self._check_start(sequence)

    def _compute(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            sequence = chunk.sequence
            end = sequence.computed + chunk.tokens
            self._write(sequence, sequence.pages, sequence.published * BLOCK_TOKENS, end)
            finishes = chunk.reaches_end
            self.scheduler.commit(chunk)
            if finishes:
                sequence.append(1)
                if sequence.generated >= sequence.request.params.max_tokens:
                    self.scheduler.remove(sequence)
                    name = sequence.request.request_id
                    self.done[name] = self.sequences.pop(name)

    def _write(self, sequence: EngineSequence, pages: list[int], start: int, end: int) -> None:
        """The blocks that are full once the tokens from `start` to `end` are computed."""
        keys = sequence.block_keys(BLOCK_TOKENS, end)
        for index in range(start // BLOCK_TOKENS, len(keys)):
            block = bytearray(content(keys[index]))
            self.pages[pages[index]].copy_(torch.frombuffer(block, dtype=torch.uint8))

    def listen(self) -> None:
        """Take in what the cache tells of its blocks."""
        while (events := self.cache.take_events()) is not None:
            self.told.apply(events)

    def run(self, name: str, prompt: list[int], **options) -> EngineSequence:
        """Submit, and let everything go on until it is done."""
        self.submit(name, prompt, **options)
        self.finish()
        return self.done[name]

    def finish(self, limit: int = 2000) -> None:
        for _ in range(limit):
            self.step()
            self.copier.step()
            self.redis.step()
            busy = self.copier.queue or self.redis.queue or self.sequences or not self.cache.quiet
            if not busy:
                return
        raise AssertionError(
            f"the stage does not come to rest: waiting {len(self.scheduler.waiting)}, loading "
            f"{len(self.scheduler.loading)}, running {len(self.scheduler.running)}, pending "
            f"{sum(bool(s.lookup and s.lookup.pending) for s in self.scheduler.waiting)}, "
            f"in flight {self.tiers.in_flight}, {self.tiers.device.counts()}, "
            f"{self.dram.pool.counts()}, queues {len(self.copier.queue)} {len(self.redis.queue)}"
        )

    def check(self) -> None:
        """Every published block of every tier holds what its key says, and the books agree."""
        self.cache.check_integrity()
        for index in range(len(self.pages)):
            key = self.tiers.device.key_of(index)
            if key is not None:
                assert bytes(self.pages[index].numpy()) == content(key)
        for slot in range(self.dram.capacity):
            key = self.dram.pool.key_of(slot)
            if key is not None:
                assert bytes(self.dram.arena.payload(slot)) == content(key)
        for key, value in self.redis.values.values():
            assert value == content(key)
        self.listen()
        self.told.check(Tier.DEVICE, self.tiers.device.links())
        self.told.check(Tier.DRAM, self.dram.pool.links() if self.dram.keeps else ())
        self.told.check(Tier.REDIS, self.tiers._stored)
        self._check_load()

    def _check_load(self) -> None:
        """What is said of the work that is here, against what a walk over it says."""
        load = self.scheduler.load()
        pending = sum(
            max(0, sequence.prefill_end - sequence.computed) for sequence in self.scheduler.running
        )
        pending += sum(
            max(1, sequence.prefill_end - len(sequence.pages) * BLOCK_TOKENS)
            for sequence in self.scheduler.loading
        )
        for sequence in self.scheduler.waiting:
            assert 1 <= sequence.uncached <= sequence.known
            pending += sequence.uncached
        assert load.pending_tokens == pending
        assert load.context_tokens == sum(each.computed for each in self.scheduler.running)

    def _check_start(self, sequence: EngineSequence) -> None:
        reused = sequence.computed // BLOCK_TOKENS
        keys = sequence.block_keys(BLOCK_TOKENS, sequence.computed)
        for key, page in zip(keys[:reused], sequence.pages, strict=False):
            assert bytes(self.pages[page].numpy()) == content(key), "a page holds another block"
        assert sequence.computed < sequence.known
        use = sequence.cache_use
        assert use is not None
        assert sum(run.blocks for run in use.runs) * BLOCK_TOKENS >= sequence.prompt_tokens
        assert use.cached_tokens <= sequence.prompt_tokens
        if not self.scheduler.preemptions:  # else it may have been, since its use was counted
            assert use.cached_tokens == min(sequence.computed, sequence.prompt_tokens)
