"""A model without a model: bytes as tokens, scripted answers, a replica that keeps count."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from cache.block import NOBODY, Owner, Tier
from cache.block_events import BlockEvents, TierChange
from cache.hashing import chain, leave_shared
from cache.report import BlockRun, CacheStats, CacheUse, Erased, Miss, TenantShare, TierStats
from engine.report import EngineStats
from engine.request import EngineOutput, EngineRequest, FinishReason, TokenLogprobs
from gateway.dispatch.member import Condition, Health
from gateway.replica import ReplicaUnavailable, TokenStream
from gateway.replicas.in_process import HUNG_AFTER_S
from policies.cost import Coefficients

COST = Coefficients(
    constant_s=5e-3,
    token_s=200e-6,
    sequence_s=300e-6,
    attended_s=0.2e-6,
    context_read_s=1e-6,
    dram_latency_s=50e-6,
    dram_block_s=70e-6,
    redis_latency_s=1e-3,
    redis_block_s=400e-6,
    step_tokens=256,
    block_tokens=16,
)

BOS, EOS = 256, 257
VOCAB = 258


class ByteTokenizer:
    """Token ids are bytes; two control tokens beside them."""

    vocab_size = VOCAB
    identity = hashlib.sha256(b"byte tokenizer").hexdigest()
    bos_token_id = BOS
    eos_token_ids = frozenset({EOS})
    strips_leading_space = False

    def encode(self, text: str, *, control_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def fewest_tokens(self, text: str) -> int:
        return len(text) // 4

    def decode(self, ids, *, skip_special: bool = False) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def token_text(self, token_id: int) -> str:
        if token_id < 256:
            return bytes([token_id]).decode(errors="replace")
        return {BOS: "<|start|>", EOS: "<|end|>"}[token_id]

    def is_control(self, token_id: int) -> bool:
        return token_id >= 256


class RoleTemplate:
    """`<|start|>role:content<|end|>` per turn, then the opening of an answer."""

    def __init__(self, *, shows_tool_calls: bool = True) -> None:
        self._shows_tool_calls = shows_tool_calls

    def encode(self, messages, *, add_generation_prompt=True, tools=None, now=None) -> list[int]:
        ids: list[int] = []
        for message in messages:
            text = f"{message['role']}:{message['content']}"
            if self._shows_tool_calls and "tool_calls" in message:
                text += str(message["tool_calls"])
            ids += [BOS, *text.encode(), EOS]
        if add_generation_prompt:
            ids += [BOS, *b"assistant:"]
        return ids


@dataclass
class ScriptedReplica:
    """Answers every request with `answer` (one byte a token) and an end-of-sequence token.

    `step_s` is between two tokens and `prefill_s` before the first. A `gate` holds the first token
    until it is set. `burst` tokens come in one output. `dies_after` tokens the engine is lost;
    `fails_after` tokens the request alone fails. Prompt blocks of 16 tokens are cached by their
    links, and come from the tier that `tier_of` says of their place in the prompt.
    """

    answer: bytes = b"Hello, world"
    name: str = "fake/0"
    step_s: float = 0.0
    prefill_s: float = 0.0
    burst: int = 1
    gate: asyncio.Event | None = None
    dies_after: int | None = None
    fails_after: int | None = None
    full: bool = False
    alive: bool = True
    last_step_age_s: float = 0.0
    answers: dict[int, bytes] = field(default_factory=dict)
    requests: list[EngineRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    open: int = 0
    generated: int = 0
    tier_of: Callable[[int], Tier] = lambda index: Tier.DEVICE
    owners: dict[bytes, Owner] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0
    redis_answers: bool = True

    @asynccontextmanager
    async def submit(self, request: EngineRequest) -> AsyncIterator[TokenStream]:
        if self.full:
            raise ReplicaUnavailable("Every place in the engine's queue is taken.", full=True)
        self.requests.append(request)
        self.open += 1
        run = _Run(self, request)
        try:
            yield run.outputs()
        finally:
            self.open -= 1
            if not run.finished:
                self.aborted.append(request.request_id)

    def health(self) -> Health:
        stuck = self.open and self.last_step_age_s > HUNG_AFTER_S
        return Health(Condition.SERVING if self.alive and not stuck else Condition.DOWN)

    def coefficients(self) -> Coefficients:
        return COST

    async def set_shares(self, device, dram, redis) -> None:
        pass

    async def block_snapshot(self) -> BlockEvents:
        changes = (TierChange(Tier.DEVICE, tuple(self.owners)),)
        return BlockEvents(epoch=1, seq=1, changes=changes, snapshot=True)

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=0,
            running=self.open,
            pages_free=1,
            pages_cached=0,
            pages_held=0,
            pages_total=1,
            preemptions=0,
            steps=0,
            alive=self.alive,
            last_step_age_s=self.last_step_age_s,
        )

    def cache_stats(self) -> CacheStats:
        blocks = len(self.owners)
        tenants = sorted({owner.tenant for owner in self.owners.values()})
        return CacheStats(
            tiers=(
                TierStats(
                    Tier.DEVICE,
                    free=1000 - blocks,
                    cached=blocks,
                    total=1000,
                    used_bytes=1024 * blocks,
                    total_bytes=1024 * 1000,
                    hits=self.hits,
                    stores=blocks,
                    misses={Miss.NEVER_SEEN: self.misses},
                ),
                TierStats(Tier.REDIS, up=self.redis_answers),
            ),
            tenants=tuple(
                TenantShare(tenant, sum(o.tenant == tenant for o in self.owners.values()), 0, 0)
                for tenant in tenants
            ),
        )

    async def erase_cache(self, tenant: bytes, scope: bytes | None) -> Erased:
        gone = [
            link
            for link, owner in self.owners.items()
            if owner.tenant == tenant and scope in (None, owner.scope)
        ]
        return self._remove(gone)

    async def flush_cache(self) -> Erased:
        return self._remove(list(self.owners))

    def _remove(self, links: list[bytes]) -> Erased:
        for link in links:
            del self.owners[link]
        return Erased(device=len(links), dram=0, redis=0 if self.redis_answers else None)

    async def drain(self, timeout_s: float) -> None:
        pass

    async def close(self) -> None:
        pass

    def look_up(self, request: EngineRequest) -> CacheUse:
        """How a prompt meets the cache, in which its blocks are from now on."""
        full = len(request.prompt_token_ids) // 16
        if request.chain_root is None:
            runs = (BlockRun(0, full, None, Miss.NOT_READ),) if full else ()
            return CacheUse(16, runs=runs)
        links = block_links(request)
        found = 0
        while (
            request.read_cache
            and found < full
            and links[found] in self.owners
            and 16 * (found + 1) < len(request.prompt_token_ids)
        ):
            found += 1
        shared = request.shared.tokens // 16 if request.shared is not None else 0
        for i, link in enumerate(links):
            self.owners.setdefault(link, NOBODY if i < shared else request.owner)
        tiers = [self.tier_of(i) for i in range(found)]
        self.hits += found
        self.misses += full - found
        runs = [BlockRun(i, 1, tier) for i, tier in enumerate(tiers)]
        if found < full:
            runs.append(BlockRun(found, full - found, None, Miss.NEVER_SEEN))
        return CacheUse(
            16,
            16 * tiers.count(Tier.DEVICE),
            16 * tiers.count(Tier.DRAM),
            16 * tiers.count(Tier.REDIS),
            runs=tuple(runs),
        )


def block_links(request: EngineRequest) -> list[bytes]:
    """The chain hash of every full block of a prompt: the shared prefix's, then its own."""
    ids = np.asarray(request.prompt_token_ids, dtype="<u4").tobytes()
    root, shared = request.chain_root, request.shared
    assert root is not None
    if shared is None:
        return list(chain(root, ids))
    assert shared.tokens % 16 == 0
    common = list(chain(shared.root, ids[: 4 * shared.tokens]))
    return [*common, *chain(leave_shared(common[-1], root), ids[4 * shared.tokens :])]


class _Run:
    def __init__(self, replica: ScriptedReplica, request: EngineRequest) -> None:
        self._replica = replica
        self._request = request
        self.finished = False

    async def outputs(self) -> AsyncIterator[EngineOutput]:
        replica, request = self._replica, self._request
        params = request.params
        if replica.gate is not None:
            await replica.gate.wait()
        await asyncio.sleep(replica.prefill_s)
        use = replica.look_up(request)
        cached = use.cached_tokens
        text = replica.answers.get(params.choice_index, replica.answer)
        tokens = [*text, EOS]
        sent = resumed = len(request.generated_token_ids)
        assert tuple(tokens[:resumed]) == request.generated_token_ids
        while True:
            if replica.dies_after is not None and sent >= replica.dies_after:
                self.finished = True
                raise ReplicaUnavailable("The engine stopped before the answer was complete.")
            if replica.fails_after is not None and sent >= replica.fails_after:
                self.finished = True
                yield EngineOutput(
                    request.request_id, (), (), cached, FinishReason.ERROR, error="secret reason"
                )
                return
            burst = tokens[sent : min(sent + replica.burst, params.max_tokens)]
            ends = [i for i, t in enumerate(burst) if t in params.stop_token_ids]
            burst = burst[: ends[0] + 1] if ends else burst
            first = sent == resumed
            sent += len(burst)
            replica.generated += len(burst)
            stopped = burst[-1] in params.stop_token_ids or (
                burst[-1] == EOS and not params.ignore_eos
            )
            reason = None
            if stopped:
                reason = FinishReason.STOP
            elif sent >= params.max_tokens:
                reason = FinishReason.LENGTH
            self.finished = reason is not None
            yield EngineOutput(
                request_id=request.request_id,
                token_ids=tuple(burst),
                logprobs=tuple(logprobs_of(t, params.logprobs) for t in burst)
                if params.logprobs is not None
                else (),
                cached_tokens=cached,
                finish_reason=reason,
                stopped_by_token=stopped,
                prompt_logprobs=tuple(
                    logprobs_of(t, params.prompt_logprobs) for t in request.prompt_token_ids[1:]
                )
                if params.prompt_logprobs is not None and sent - len(burst) == 0
                else None,
                cache_use=use if first else None,
            )
            if reason is not None:
                return
            if sent >= len(tokens):
                tokens += [*text, EOS]
            await asyncio.sleep(replica.step_s)


def logprobs_of(token: int, alternatives: int) -> TokenLogprobs:
    """Made-up numbers that a test can recognise: the token first, then its successors."""
    top = tuple(((token + i) % VOCAB, -0.5 - i) for i in range(alternatives))
    return TokenLogprobs(token, -0.5, top)
