"""What an answer cost in tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cache.block import Tier
from cache.report import CacheUse
from gateway.ledger.price_answer import priced_usage


@dataclass(frozen=True, slots=True)
class Usage:
    """`prompt_tokens` includes the cached ones, counted by the tier that they came from; every
    prompt counts once, however many choices it has. `cost_nusd` is there where the client wants to
    be told."""

    prompt_tokens: int
    cached_by_tier: Mapping[Tier, int]
    completion_tokens: int
    cost_nusd: int | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.cached_by_tier.values())

    def as_wire(self) -> dict[str, object]:
        """OpenAI's shape; `cached_tokens` is always an integer."""
        wire: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        return wire if self.cost_nusd is None else priced_usage(wire, self.cost_nusd)


def sum_by_tier(uses: Iterable[CacheUse | None]) -> dict[Tier, int]:
    """Cached tokens of several prompts by tier, every tier present; None is a prompt of which
    nothing is known to be cached."""
    total = dict.fromkeys(Tier, 0)
    for use in uses:
        if use is not None:
            total[Tier.DEVICE] += use.device_tokens
            total[Tier.DRAM] += use.dram_tokens
            total[Tier.REDIS] += use.redis_tokens
    return total
