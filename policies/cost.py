"""What work will take, in seconds: one model for routing, admission, scheduling and tiers.

A step's time is linear in its shape:

    constant + token_s * tokens + sequence_s * sequences + attended_s * attended
             + context_read_s * context_read

The constant is mostly streaming the weights, the token term the linear layers, the sequence term
output rows and sampling, and the last two attention's arithmetic and its reading of KV. A move from
a lower tier is latency + block_s * blocks. Both start from the model's shape on modest hardware and
are refitted from what is observed (`policies.online_fit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from policies.online_fit import OnlineFit, Trend

_FLOPS_PER_S = 200e9
_MEMORY_BYTES_PER_S = 20e9
_SEQUENCE_TOKENS = 0.25
"""A sequence's own cost in a step, in tokens."""
_FLOPS_PER_KV_BYTE = 4.0
"""Arithmetic per byte of KV that a token attends to: about that of three to four query heads per
KV head at 16 bit."""
_LATENCY_S = {"dram": 50e-6, "redis": 1e-3}
_BYTES_PER_S = {"dram": 5e9, "redis": 1e9}


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work in one step. `attended` is the sum over the step's tokens of the context that each
    attends to, itself included; `context_read` the sum over its sequences of their context, which
    is what has to be read of KV."""

    tokens: int
    sequences: int
    attended: int
    context_read: int


class Coefficients(NamedTuple):
    """A cost model at one moment, in seconds: what a replica tells of itself, and what routing
    predicts with. `step_tokens` is the replica's token budget of one step, `block_tokens` the size
    of the blocks that loads move. Hashable, so that predictions for equal replicas are made once.
    """

    constant_s: float
    token_s: float
    sequence_s: float
    attended_s: float
    context_read_s: float
    dram_latency_s: float
    dram_block_s: float
    redis_latency_s: float
    redis_block_s: float
    step_tokens: int
    block_tokens: int

    def step_s(self, shape: StepShape) -> float:
        """One step of this shape."""
        return (
            self.constant_s
            + self.token_s * shape.tokens
            + self.sequence_s * shape.sequences
            + self.attended_s * shape.attended
            + self.context_read_s * shape.context_read
        )

    def prefill_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        """Computing `uncached_tokens` behind `cached_tokens`, alone, in steps of `step_tokens`."""
        if uncached_tokens <= 0:
            return 0.0
        full = (uncached_tokens - 1) // self.step_tokens  # steps before the last
        steps = full + 1
        context_read = (
            steps * cached_tokens + self.step_tokens * full * (full + 1) // 2 + uncached_tokens
        )
        return (
            steps * (self.constant_s + self.sequence_s)
            + self.token_s * uncached_tokens
            + self.attended_s * _attended(cached_tokens, uncached_tokens)
            + self.context_read_s * context_read
        )

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """One token for each of `batch` sequences with `context_tokens` of context each."""
        read = batch * context_tokens
        return self.step_s(StepShape(batch, batch, read, read))

    def load_s(self, dram_tokens: int, redis_tokens: int) -> float:
        """Bringing so many tokens of KV to the device, one tier after the other: what Redis has
        goes through host memory."""
        seconds = 0.0
        if redis_tokens:
            seconds += self.redis_latency_s
            seconds += self.redis_block_s * (redis_tokens / self.block_tokens)
        if dram_tokens or redis_tokens:
            seconds += self.dram_latency_s
            seconds += self.dram_block_s * ((dram_tokens + redis_tokens) / self.block_tokens)
        return seconds


class CostModel:
    """Predicts seconds. One thread observes, any thread may ask."""

    def __init__(
        self,
        *,
        token_flops: float,
        weight_bytes: float,
        kv_token_bytes: float,
        block_bytes: int,
        step_tokens: int = 256,
    ) -> None:
        """`token_flops` are the linear layers' per token, `weight_bytes` what a step reads of
        weights, `kv_token_bytes` one token's KV over all layers, `block_bytes` one cache block's,
        `step_tokens` what a step computes at most.

        Raises ValueError unless all are positive.
        """
        token_s = token_flops / _FLOPS_PER_S
        self._step_tokens = step_tokens
        self._steps = OnlineFit(
            (
                weight_bytes / _MEMORY_BYTES_PER_S,
                token_s,
                token_s * _SEQUENCE_TOKENS,
                kv_token_bytes * _FLOPS_PER_KV_BYTE / _FLOPS_PER_S,
                kv_token_bytes / _MEMORY_BYTES_PER_S,
            )
        )
        self._prefill = Trend()
        self._decode = Trend()
        self._loads = {
            tier: OnlineFit((latency_s, block_bytes / _BYTES_PER_S[tier]))
            for tier, latency_s in _LATENCY_S.items()
        }
        self._load_trends = {tier: Trend() for tier in _LATENCY_S}

    @classmethod
    def given(cls, coefficients: Coefficients) -> CostModel:
        """One that starts from these, as another has learned them or somebody has worked them out,
        and not from a model's shape. Raises ValueError unless all times are positive."""
        model = cls(
            token_flops=1.0,
            weight_bytes=1.0,
            kv_token_bytes=1.0,
            block_bytes=1,
            step_tokens=coefficients.step_tokens,
        )
        model._steps = OnlineFit(
            (
                coefficients.constant_s,
                coefficients.token_s,
                coefficients.sequence_s,
                coefficients.attended_s,
                coefficients.context_read_s,
            )
        )
        model._loads = {
            "dram": OnlineFit((coefficients.dram_latency_s, coefficients.dram_block_s)),
            "redis": OnlineFit((coefficients.redis_latency_s, coefficients.redis_block_s)),
        }
        return model

    def step_s(self, shape: StepShape) -> float:
        """One step of this shape."""
        constant, token_s, sequence_s, attended_s, context_read_s = self._steps.coefficients
        return (
            constant
            + token_s * shape.tokens
            + sequence_s * shape.sequences
            + attended_s * shape.attended
            + context_read_s * shape.context_read
        )

    def coefficients(self, step_tokens: int, block_tokens: int) -> Coefficients:
        """The model as it is now, for whoever predicts elsewhere."""
        constant, token_s, sequence_s, attended_s, context_read_s = self._steps.coefficients
        dram_latency_s, dram_block_s = self._loads["dram"].coefficients
        redis_latency_s, redis_block_s = self._loads["redis"].coefficients
        return Coefficients(
            constant_s=constant,
            token_s=token_s,
            sequence_s=sequence_s,
            attended_s=attended_s,
            context_read_s=context_read_s,
            dram_latency_s=dram_latency_s,
            dram_block_s=dram_block_s,
            redis_latency_s=redis_latency_s,
            redis_block_s=redis_block_s,
            step_tokens=step_tokens,
            block_tokens=block_tokens,
        )

    def prefill_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        """Computing `uncached_tokens` behind `cached_tokens`, alone, in steps as full as can be."""
        return self.coefficients(self._step_tokens, 16).prefill_s(uncached_tokens, cached_tokens)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """One token for each of `batch` sequences with `context_tokens` of context each."""
        read = batch * context_tokens
        return self.step_s(StepShape(batch, batch, read, read))

    def load_s(self, tier: str, blocks: int) -> float:
        """Moving blocks one tier up in one go: from "redis" to host memory, or from "dram" to the
        device. With 0 blocks, a question that finds nothing."""
        latency_s, block_s = self._loads[tier].coefficients
        return latency_s + block_s * blocks

    def saving_s(self, start_token: int, block_tokens: int) -> float:
        """What a hit on the block at `start_token` saves: computing its tokens as part of a step
        that is run anyway."""
        _, token_s, _, attended_s, _ = self._steps.coefficients
        return token_s * block_tokens + attended_s * _attended(start_token, block_tokens)

    def observe_step(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that took `seconds`. Times that are not positive are left out."""
        trend = self._prefill if shape.tokens > shape.sequences else self._decode
        features = (1.0, shape.tokens, shape.sequences, shape.attended, shape.context_read)
        self._steps.observe(features, seconds, trend)

    def observe_load(self, tier: str, blocks: int, seconds: float) -> None:
        """Learn from a move, or with 0 blocks from a question that found nothing."""
        self._loads[tier].observe((1.0, blocks), seconds, self._load_trends[tier])

    def snapshot(self) -> dict[str, float]:
        """The coefficients in seconds, and for every kind of work that was observed the mean
        absolute relative error of about its last 200 predictions."""
        names = ("constant_s", "token_s", "sequence_s", "attended_s", "context_read_s")
        values = dict(zip(names, self._steps.coefficients, strict=True))
        for tier, fit in self._loads.items():
            values[f"{tier}_latency_s"], values[f"{tier}_block_s"] = fit.coefficients
        trends = {"prefill": self._prefill, "decode": self._decode, **self._load_trends}
        for kind, trend in trends.items():
            if trend.count:
                values[f"{kind}_error"] = trend.error
        return values


def _attended(context_tokens: int, tokens: int) -> int:
    """What `tokens` tokens behind `context_tokens` attend to, all together: each sees everything
    before it and itself."""
    return tokens * context_tokens + tokens * (tokens + 1) // 2
