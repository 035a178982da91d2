"""What a request costs, in billionths of a US dollar (nUSD), exactly."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

NUSD = 10**9
"""In one US dollar."""


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars per million tokens. `input` is for prompt tokens that were computed,
    `cached_input` for those that came from the cache, `cache_write` for those that a request asks
    to keep, on top of `input`. `batch_discount` is the share that batch jobs pay less, `storage`
    what a million tokens of a named prefix cost for each hour that they are kept."""

    input: Decimal = Decimal(0)
    cached_input: Decimal = Decimal(0)
    output: Decimal = Decimal(0)
    cache_write: Decimal = Decimal(0)
    batch_discount: Decimal = Decimal("0.5")
    storage: Decimal = Decimal(0)

    def request_nusd(
        self,
        *,
        uncached_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        written_tokens: int = 0,
        batch: bool = False,
    ) -> int:
        """One request, rounded up to a whole nUSD."""
        # a dollar per million tokens is a thousand nUSD per token
        usd = (
            self.input * uncached_tokens
            + self.cached_input * cached_tokens
            + self.output * output_tokens
            + self.cache_write * written_tokens
        )
        if batch:
            usd *= 1 - self.batch_discount
        return _whole(usd * 1000)

    def storage_nusd(self, tokens: int, hours: float) -> int:
        """Keeping a named prefix, rounded up to a whole nUSD."""
        return _whole(self.storage * tokens * Decimal(str(hours)) * 1000)


FREE = Price()


def _whole(nusd: Decimal) -> int:
    return int(nusd.to_integral_value(ROUND_CEILING))
