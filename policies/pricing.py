"""What a request costs, in billionths of a US dollar (nUSD), exactly."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal

NUSD = 10**9
"""In one US dollar."""

_TOKENS_OF_A_PRICE = 10**6
_EXACT = Context(prec=80)
"""Enough for the product of any price, token count and time that can be configured."""


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars per million tokens. `input` is for prompt tokens that were computed,
    `cached_input` for those that came from the cache, `cache_write` for those that a request asks
    to keep (`written_tokens`), on top of `input`. `batch_discount` is the share that batch jobs pay
    less, `storage` what a million tokens of a named prefix cost for each hour that they are kept.
    """

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
        """One request, rounded up to a whole nUSD, once."""
        if not (self.input or self.cached_input or self.output or self.cache_write):
            return 0  # where nothing is priced, as in most gateways, nothing need be multiplied
        usd = Decimal(0)
        for rate, tokens in (
            (self.input, uncached_tokens),
            (self.cached_input, cached_tokens),
            (self.output, output_tokens),
            (self.cache_write, written_tokens),
        ):
            usd = _EXACT.add(usd, _EXACT.multiply(rate, Decimal(tokens)))
        if batch:
            usd = _EXACT.multiply(usd, _EXACT.subtract(Decimal(1), self.batch_discount))
        return _whole(_EXACT.multiply(usd, _NUSD_PER_TOKEN))

    def storage_nusd(self, tokens: int, seconds: int) -> int:
        """Keeping a named prefix of so many tokens for so long, rounded up to a whole nUSD."""
        usd_seconds = _EXACT.multiply(self.storage, Decimal(tokens * seconds))
        nusd_seconds = _EXACT.multiply(usd_seconds, _NUSD_PER_TOKEN)
        # rounding up twice is rounding up once: ceil(ceil(x) / n) is ceil(x / n)
        return -(-_whole(nusd_seconds) // 3600)


FREE = Price()

_NUSD_PER_TOKEN = Decimal(NUSD // _TOKENS_OF_A_PRICE)
"""Of a price of one dollar per million tokens."""


def written_tokens(prompt_tokens: int, cached_tokens: int, kept_tokens: int) -> int:
    """How many tokens of a prompt are charged as written to the cache.

    `kept_tokens` is the longest beginning of the prompt that its client asked to keep. Of it, those
    count that were computed: what a cache had already, which is always a beginning too, is read and
    not written.
    """
    return max(0, min(kept_tokens, prompt_tokens) - cached_tokens)


def usd_text(nusd: int) -> str:
    """An amount in US dollars as an exact decimal number, with all nine places."""
    sign = "-" if nusd < 0 else ""
    dollars, rest = divmod(abs(nusd), NUSD)
    return f"{sign}{dollars}.{rest:09d}"


def _whole(nusd: Decimal) -> int:
    return int(nusd.to_integral_value(ROUND_CEILING))
