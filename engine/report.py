"""What an engine tells its owner, once per step."""

from __future__ import annotations

from dataclasses import dataclass

from cache.block_events import BlockEvents
from engine.request import EngineOutput
from policies.cost import Coefficients


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot between two steps. `pages_free + pages_cached + pages_held == pages_total`."""

    waiting: int
    running: int
    pages_free: int
    pages_cached: int
    pages_held: int
    pages_total: int
    preemptions: int
    steps: int
    alive: bool
    """False once the step loop has died; nothing more will come out."""
    last_step_age_s: float
    """Seconds since the loop last finished a step or found nothing to do."""
    pending_tokens: int = 0
    """Tokens that are neither computed nor found in the cache yet, of all that is here: of prompts,
    and of answers that go on from elsewhere or were preempted."""
    context_tokens: int = 0
    """The running sequences' contexts, as far as they are computed, all together."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step's model needed, see `engine.step_work`: `flops` of arithmetic, and `bytes` that
    had to be read and written. `prefill`: it computed more than one token of some sequence."""

    flops: int
    bytes: int
    prefill: bool


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a device was measured to do at best, see `engine.peaks`: FLOP/s of a product of dense
    matrices in the number format of an engine, and bytes/s of its memory."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step's outcome, handed to the owner's sink in one call (one event-loop wake-up).

    `seconds`, `tokens` (rows computed) and `sequences` describe the forward step; they are zero
    when the report only carries aborts or rejections. `events` is what the tiers have come to hold
    or lost since the report before, None for nothing; `cost` what work takes here, None for as last
    told; `work` what the step needed, None for no step, one that failed in part, or where the
    engine was not told its model's shape.
    """

    outputs: tuple[EngineOutput, ...]
    seconds: float
    tokens: int
    sequences: int
    stats: EngineStats
    events: BlockEvents | None = None
    cost: Coefficients | None = None
    work: StepWork | None = None
