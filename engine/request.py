"""What goes into an engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic

from cache.block import NOBODY, Owner, Retention
from cache.report import CacheUse
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first `tokens` of a prompt (whole blocks of 16) are an operator's shared prefix, chained
    from `root` and owned by nobody."""

    root: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate: token ids in.

    `chain_root` seeds the prefix hash chain: equal roots may share KV, unequal ones never do (see
    `cache.hashing.chain_root`). None keeps this sequence's KV out of the cache altogether. Lower
    `priority` runs first; within one, flows (whoever has the same `flow`) share by `weight`, and
    within a flow the earliest `deadline_s` (`time.monotonic`, for its first token) comes first. No
    step is made so long by others' prompts that its tokens come later than `tpot_s` apart, but for
    one that was put aside for its own prompt. `read_cache` False computes every prompt token
    (prompt logprobs need it) but still stores the blocks. `owner` is whose the blocks are, for
    quotas and erasure; `shared` a prefix that belongs to everybody; `retention` which prefixes to
    keep longer than others.

    `generated_token_ids` are tokens that another replica has generated for this request already:
    generation goes on behind them, with the draws, penalties and `params.max_tokens` (which count
    them) as if it had never stopped. Only new tokens are put out.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    chain_root: bytes | None
    priority: int = 0
    read_cache: bool = True
    owner: Owner = NOBODY
    shared: SharedPrefix | None = None
    retention: tuple[Retention, ...] = ()
    generated_token_ids: tuple[int, ...] = ()
    flow: bytes = b""
    weight: float = 1.0
    deadline_s: float | None = None
    tpot_s: float | None = None


class FinishReason(StrEnum):
    """Why a sequence ended. `STOP`: end-of-sequence or a stop token. `ERROR`: see the message."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token's, and the most likely alternatives'.

    `top` is sorted from most to least likely and has as many entries as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one step produced for one sequence.

    `token_ids` are the newly generated tokens (usually one; none on an abort or error). A token
    that ended the sequence (end-of-sequence or a stop token) is included, and `finish_reason` is
    then STOP, so a consumer that shows text drops the last token exactly if `stopped_by_token`.
    `cached_tokens` counts prompt tokens served from the cache, fixed once the first token is out.
    `prompt_logprobs` comes once, with the first token: one entry per prompt token from the second;
    a request that goes on from elsewhere had them there. `cache_use` comes once too, with the first
    token that this engine chose: what `cached_tokens` is made of. `made_s` is when it was made, by
    the monotonic clock of the machine.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    cached_tokens: int
    finish_reason: FinishReason | None
    stopped_by_token: bool = False
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    cache_use: CacheUse | None = None
    made_s: float = field(default_factory=monotonic, compare=False)
