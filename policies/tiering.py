"""What is worth moving between tiers: up when a prompt asks, down when a tier is full."""

from __future__ import annotations

import math
from collections.abc import Sequence

from policies.cost import CostModel

_PROBE_ROUND_TRIPS = 10
"""Redis is asked only where computing takes at least so many round trips: a question in vain then
delays a prompt by at most a tenth."""
_LEAST_DEADLINE_S = 0.005

_PENDING = 0.5
_BLOCKS_PER_PRIOR = 180
"""Where moving a block takes a fiftieth of computing it, writing on trust then goes on for about a
third of the lower tier."""
_EXPLORE_EVERY = 256
_LEAST_REMEMBERED, _MOST_REMEMBERED = 32_768, 262_144
_REMEMBERED_PER_BLOCK = 2


def remembered_blocks(kept_blocks: int) -> int:
    """How many blocks to remember where the device and DRAM together keep so many: twice those, so
    that what comes back after it was pushed out is known to do so and is worth a copy below. About
    700 bytes each, between 23 and 180 MB in all."""
    remembered = _REMEMBERED_PER_BLOCK * kept_blocks
    return max(_LEAST_REMEMBERED, min(_MOST_REMEMBERED, remembered))


def choose_load(
    runs: Sequence[tuple[str, int]],
    *,
    start_block: int,
    block_tokens: int,
    prompt_tokens: int,
    cost: CostModel,
    arrived: bool = False,
) -> int:
    """How many of the leading runs to load: the cut with the least loading and computing.

    `runs` are (tier, blocks), adjacent and in prompt order from `start_block`; what is before them
    is on the device, what is behind the cut is computed. What comes from Redis lands in DRAM and
    is copied to the device from there; `arrived` says that it already has landed. 0: compute all.
    """
    from_redis = 0
    loaded = 0
    best = 0
    best_s = cost.prefill_s(prompt_tokens - start_block * block_tokens, start_block * block_tokens)
    for count, (tier, blocks) in enumerate(runs, start=1):
        loaded += blocks
        if tier == "redis" and not arrived:
            from_redis += blocks
        total_s = cost.load_s("dram", loaded)
        if from_redis:
            total_s += cost.load_s("redis", from_redis)
        cached_tokens = (start_block + loaded) * block_tokens
        # the last token is computed whatever was cached
        total_s += cost.prefill_s(max(1, prompt_tokens - cached_tokens), cached_tokens)
        if total_s < best_s:
            best, best_s = count, total_s
    return best


def probe_is_worth(
    missing_blocks: int, block_tokens: int, start_token: int, cost: CostModel
) -> bool:
    """Whether to ask Redis for blocks that may not be there: only where computing them costs
    clearly more than the question, and more than moving them."""
    compute_s = cost.saving_s(start_token, missing_blocks * block_tokens)
    move_s = cost.load_s("redis", missing_blocks) + cost.load_s("dram", missing_blocks)
    return compute_s > max(move_s, _PROBE_ROUND_TRIPS * cost.load_s("redis", 0))


def load_deadline_s(start_token: int, tokens: int, cost: CostModel) -> float:
    """How long a load may take: as long as computing what it replaces, and at least 5 ms."""
    return max(_LEAST_DEADLINE_S, cost.prefill_s(tokens, start_token))


class SecondLook:
    """When to do all the same what was judged to be too slow: without it, an estimate from bad
    times would keep anyone from finding out that they are over. One in `every_s` seconds is little
    to lose where the judgement was right.
    """

    def __init__(self, every_s: float = 5.0) -> None:
        self._every_s = every_s
        self._last_s: float | None = None

    def due(self, now_s: float) -> bool:
        """Whether this one is to be done all the same; the first judgement stands."""
        if self._last_s is None:
            self._last_s = now_s
        if now_s - self._last_s < self._every_s:
            return False
        self._last_s = now_s
        return True


class WriteWorth:
    """Whether a block that leaves a tier is worth a copy one tier down.

    A block that was hit will be again. For one that was not, the chance is estimated from what
    became of those pushed out before: `p_reuse` is the mean of a Beta distribution over outcomes,
    which count less with age. An outcome may take long to show, and unique traffic would be written
    down meanwhile: so a block counts as half lost when it is pushed out, and the rest is settled
    when it is asked again or forgotten. In a steady state this is exact, whatever the half.

    The outcomes come from whoever remembers the blocks, whether or not they were written, so that
    the estimate keeps learning while nothing is written; and one block in 256 that would not be
    written is, so that it cannot hang on a memory that is too short.
    """

    def __init__(
        self, *, prior: float = 0.5, prior_blocks: float = 2.0, half_life_blocks: int = 1000
    ) -> None:
        """`prior`: the chance of reuse to begin with, worth `prior_blocks` outcomes. After
        `half_life_blocks` more blocks an outcome counts half."""
        if not 0 < prior < 1:
            raise ValueError(f"prior must be between 0 and 1, not {prior}")
        if half_life_blocks < 1:
            raise ValueError(f"half_life_blocks must be at least 1, not {half_life_blocks}")
        if prior_blocks <= 0:
            raise ValueError(f"prior_blocks must be positive, not {prior_blocks}")
        self._prior = prior
        self._prior_blocks = prior_blocks
        self._log_decay = math.log(0.5) / half_life_blocks
        self._reused = 0.0
        self._lost = 0.0
        self._refused = 0

    @classmethod
    def over(cls, capacity_blocks: int) -> WriteWorth:
        """For a lower tier of so many blocks: before there is any evidence, a good part of it is
        filled on trust, so that the first round of a working set that fits is not thrown away."""
        return cls(
            prior_blocks=max(2.0, capacity_blocks / _BLOCKS_PER_PRIOR),
            half_life_blocks=max(1000, capacity_blocks // 3),
        )

    @property
    def p_reuse(self) -> float:
        """The chance that a block is asked for again after it was pushed out."""
        reused = self._prior * self._prior_blocks + self._reused
        return reused / (self._prior_blocks + self._reused + self._lost)

    def pushed_out(self, n: int = 1) -> None:
        """Blocks left the tier, written down or not. Each is then counted once more, by one of the
        next two."""
        decay = math.exp(self._log_decay * n)
        self._reused *= decay
        self._lost = self._lost * decay + _PENDING * n

    def asked_again(self, n: int = 1) -> None:
        """Of these, some were asked for again."""
        self._reused += n
        self._lost = max(0.0, self._lost - _PENDING * n)

    def forgotten(self, n: int = 1) -> None:
        """Of these, some were not asked for while they were remembered."""
        self._lost += (1 - _PENDING) * n

    def is_worth(self, *, hits: int, saving_s: float, load_s: float, store_s: float) -> bool:
        """Whether to write a block down: `saving_s` is what computing it takes, `load_s` and
        `store_s` moving it up and down."""
        gain_s = saving_s - load_s
        if gain_s <= 0:
            return False
        if hits > 0 or self.p_reuse * gain_s > store_s:
            return True
        self._refused += 1
        return self._refused % _EXPLORE_EVERY == 0
