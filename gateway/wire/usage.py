"""What an answer cost in tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cache.block import Tier
from cache.report import CacheUse
from gateway.ledger.price_answer import priced_usage

ASKED_TIERS = "x-forebay-cached-tiers"
"""The request header, `include`, by which a client asks in which tiers cached tokens were."""


@dataclass(frozen=True, slots=True)
class Usage:
    """`prompt_tokens` includes the cached ones, counted by the tier that they came from; every
    prompt counts once, however many choices it has. `cost_nusd` is there where the client wants to
    be told, and `tells_tiers` set where it wants to know where the cached ones were."""

    prompt_tokens: int
    cached_by_tier: Mapping[Tier, int]
    completion_tokens: int
    cost_nusd: int | None = None
    tells_tiers: bool = False

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.cached_by_tier.values())

    def as_wire(self) -> dict[str, object]:
        """OpenAI's shape; `cached_tokens` is always an integer."""
        details: dict[str, object] = {"cached_tokens": self.cached_tokens}
        if self.tells_tiers:
            details["cached_tokens_by_tier"] = {
                tier.value: tokens for tier, tokens in self.cached_by_tier.items()
            }
        wire: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": details,
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
