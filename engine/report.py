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
class StepReport:
    """One step's outcome, handed to the owner's sink in one call (one event-loop wake-up).

    `seconds`, `tokens` (rows computed) and `sequences` describe the forward step; they are zero
    when the report only carries aborts or rejections. `events` is what the tiers have come to hold
    or lost since the report before, None for nothing; `cost` what work takes here, None for as last
    told.
    """

    outputs: tuple[EngineOutput, ...]
    seconds: float
    tokens: int
    sequences: int
    stats: EngineStats
    events: BlockEvents | None = None
    cost: Coefficients | None = None
