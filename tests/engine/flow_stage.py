"""A scheduler over device pages alone, without a model: who is served how much, and when.

Time is counted in steps of `step_s`, and deadlines are on that clock.
"""

from __future__ import annotations

from collections import Counter

from cache.block_pool import BlockPool
from cache.sightings import Sightings
from cache.tiered_cache import TieredCache
from cache.tiers import Tiers
from engine.batching import step_shape
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduler import Chunk, Scheduler
from engine.sequence import Sequence
from policies.batching import CONTINUOUS, Batching
from policies.cost import CostModel, StepShape

BLOCK_TOKENS = 16


class FlatCost(CostModel):
    """A step takes `constant_s`, and `token_s` for each token."""

    def __init__(self, constant_s: float = 0.01, token_s: float = 0.001) -> None:
        super().__init__(token_flops=1e9, weight_bytes=1e9, kv_token_bytes=4.0, block_bytes=64)
        self.constant_s, self.token_s = constant_s, token_s

    def step_s(self, shape: StepShape) -> float:
        return self.constant_s + self.token_s * shape.tokens


class FlowStage:
    """`units` and `tokens` are what flows were served so far, `served` what priorities were."""

    def __init__(
        self,
        *,
        pages: int = 512,
        max_running: int = 16,
        step_tokens: int = 256,
        cost: CostModel | None = None,
        step_s: float = 0.01,
        batching: Batching = CONTINUOUS,
    ) -> None:
        tiers = Tiers(
            BlockPool(pages),
            None,
            None,
            cost=cost or FlatCost(),
            sightings=Sightings(),
            block_tokens=BLOCK_TOKENS,
            block_bytes=64,
            copy_page=lambda source, target: None,
            wake=lambda: None,
        )
        self.now_s = 0.0
        self.cache = TieredCache(tiers, ahead=1)
        self.scheduler = Scheduler(
            self.cache,
            block_tokens=BLOCK_TOKENS,
            step_tokens=step_tokens,
            max_running=max_running,
            prompt_logprob_tokens=64,
            batching=batching,
            clock=lambda: self.now_s,
        )
        self.sequences: dict[str, Sequence] = {}
        self.done: list[str] = []
        self.started: list[str] = []
        self.units: Counter[bytes] = Counter()
        self.tokens: Counter[bytes] = Counter()
        self.served: Counter[int] = Counter()
        self.shapes: list[StepShape] = []
        self._step_s = step_s
        self._step_tokens = step_tokens
        self._max_running = max_running
        self._arrivals = 0

    def submit(
        self,
        name: str,
        prompt_tokens: int | list[int],
        max_tokens: int = 8,
        *,
        flow: bytes = b"",
        weight: float = 1.0,
        priority: int = 0,
        deadline_s: float | None = None,
        tpot_s: float | None = None,
    ) -> Sequence:
        """A prompt of so many tokens that no other has, or of these."""
        prompt = prompt_tokens
        if isinstance(prompt, int):
            prompt = [(self._arrivals + 1) * 10_000 + index for index in range(prompt)]
        request = EngineRequest(
            name,
            prompt,
            SamplingParams(max_tokens=max_tokens, temperature=0.0),
            chain_root=b"r" * 16,
            priority=priority,
            flow=flow,
            weight=weight,
            deadline_s=deadline_s,
            tpot_s=tpot_s,
        )
        sequence = self.sequences[name] = Sequence(request, self._arrivals, self.now_s)
        self._arrivals += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """One step; what was computed of whom."""
        chunks = self.scheduler.schedule()
        assert sum(chunk.tokens for chunk in chunks) <= self._step_tokens
        self.shapes.append(step_shape(chunks))
        self.now_s += self._step_s
        for chunk in chunks:
            self._take(chunk)
        return {chunk.sequence.request.request_id: chunk.tokens for chunk in chunks}

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def finish(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.sequences:
                break
            assert self.step(), "work is here, and none of it can run"
        assert not self.sequences, f"unfinished: {sorted(self.sequences)}"
        self.check()

    def abort(self, name: str) -> None:
        self.scheduler.remove(self.sequences.pop(name))

    def check(self) -> None:
        """The books agree; with nothing here, nothing is held."""
        self.cache.check_integrity()
        scheduler = self.scheduler
        lobby = [] if scheduler._lobby is None else list(scheduler._lobby)
        places = [*scheduler.running, *scheduler.loading, *scheduler.waiting, *lobby]
        assert len(places) == len(set(places)) == len(self.sequences)
        assert scheduler.in_line == len(places) - len(scheduler.running)
        assert len(scheduler.waiting) == len(list(scheduler.waiting))
        assert scheduler.running == sorted(scheduler.running, key=lambda each: each.rank)
        assert all(each.prepaid >= 0 for each in self.sequences.values())
        load = scheduler.load()
        pending = sum(each.uncached for each in (*scheduler.waiting, *lobby))
        pending += sum(max(0, each.prefill_end - each.computed) for each in scheduler.running)
        assert load.pending_tokens == pending
        if not self.sequences:
            assert self.cache.device.counts().held == 0
            assert sorted(scheduler._free_slots) == list(range(self._max_running))

    def _take(self, chunk: Chunk) -> None:
        sequence, request = chunk.sequence, chunk.sequence.request
        if request.request_id not in self.started:
            self.started.append(request.request_id)
        generates = chunk.reaches_end
        new = max(0, sequence.computed + chunk.tokens - max(sequence.charged, sequence.computed))
        self.scheduler.commit(chunk)
        self.units[request.flow] += new + generates
        self.tokens[request.flow] += (new if sequence.generated == 0 else 0) + generates
        self.served[sequence.rank.priority] += new + generates
        if generates:
            sequence.append(1)
            if sequence.generated >= request.params.max_tokens:
                self.scheduler.remove(sequence)
                del self.sequences[request.request_id]
                self.done.append(request.request_id)
