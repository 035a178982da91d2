"""What requests cost."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from math import ceil
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.pricing import FREE, NUSD, Price, usd_text, written_tokens

RATES = st.decimals(min_value=0, max_value=1_000_000, places=12)
TOKENS = st.integers(0, 10**9)
COUNTS = st.fixed_dictionaries(
    {
        "uncached_tokens": TOKENS,
        "cached_tokens": TOKENS,
        "output_tokens": TOKENS,
        "written_tokens": TOKENS,
    }
)
PRICES = st.builds(
    Price,
    input=RATES,
    cached_input=RATES,
    output=RATES,
    cache_write=RATES,
    batch_discount=st.decimals(min_value=0, max_value=1, places=6),
    storage=RATES,
)


def exact_nusd(price: Price, counts: dict[str, int]) -> Fraction:
    """By other arithmetic."""
    usd = (
        Fraction(price.input) * counts["uncached_tokens"]
        + Fraction(price.cached_input) * counts["cached_tokens"]
        + Fraction(price.output) * counts["output_tokens"]
        + Fraction(price.cache_write) * counts["written_tokens"]
    ) / 10**6
    return usd * NUSD


def test_a_request_by_hand() -> None:
    price = Price(
        input=Decimal("0.10"),
        cached_input=Decimal("0.01"),
        output=Decimal("0.40"),
        cache_write=Decimal("0.025"),
    )
    counts: dict[str, Any] = {
        "uncached_tokens": 1_000_000,
        "cached_tokens": 2_000_000,
        "output_tokens": 500_000,
        "written_tokens": 400_000,
    }
    # 0.10 + 0.02 + 0.20 + 0.01 dollars
    assert price.request_nusd(**counts) == 330_000_000
    assert price.request_nusd(**counts, batch=True) == 165_000_000
    assert FREE.request_nusd(**counts) == 0


def test_a_single_cheap_token_costs_something() -> None:
    price = Price(input=Decimal("0.0000001"))
    assert price.request_nusd(uncached_tokens=1, cached_tokens=0, output_tokens=0) == 1


@settings(max_examples=60, deadline=None)
@given(PRICES, COUNTS)
def test_exact_and_rounded_up_once(price: Price, counts: dict[str, int]) -> None:
    exact = exact_nusd(price, counts)
    assert price.request_nusd(**counts) == ceil(exact)
    discounted = exact * (1 - Fraction(price.batch_discount))
    assert price.request_nusd(**counts, batch=True) == ceil(discounted)


@settings(max_examples=60, deadline=None)
@given(PRICES, COUNTS, st.sampled_from(["uncached", "cached", "output", "written"]), TOKENS)
def test_more_tokens_never_cost_less(
    price: Price, counts: dict[str, int], what: str, more: int
) -> None:
    larger = {**counts, f"{what}_tokens": counts[f"{what}_tokens"] + more}
    assert price.request_nusd(**larger) >= price.request_nusd(**counts)


@settings(max_examples=60, deadline=None)
@given(PRICES, COUNTS)
def test_a_batch_costs_what_its_discount_leaves(price: Price, counts: dict[str, int]) -> None:
    whole, batch = price.request_nusd(**counts), price.request_nusd(**counts, batch=True)
    assert 0 <= batch <= whole
    assert replace(price, batch_discount=Decimal(0)).request_nusd(**counts, batch=True) == whole
    assert replace(price, batch_discount=Decimal(1)).request_nusd(**counts, batch=True) == 0


@settings(max_examples=60, deadline=None)
@given(PRICES, st.integers(0, 10**7), st.integers(0, 10**7))
def test_storage_is_exact_too(price: Price, tokens: int, seconds: int) -> None:
    exact = Fraction(price.storage) * tokens * seconds / 3600 * 1000
    assert price.storage_nusd(tokens, seconds) == ceil(exact)


def test_storage_by_hand() -> None:
    price = Price(storage=Decimal("1.00"))
    assert price.storage_nusd(1_000_000, 3600) == NUSD
    assert price.storage_nusd(1_000_000, 1800) == NUSD // 2
    assert price.storage_nusd(1, 1) == 1
    assert price.storage_nusd(1, 0) == 0


@settings(max_examples=60, deadline=None)
@given(TOKENS, TOKENS, TOKENS)
def test_written_tokens_were_computed_and_are_to_be_kept(
    prompt: int, cached: int, kept: int
) -> None:
    cached = min(cached, prompt)
    written = written_tokens(prompt, cached, kept)
    assert 0 <= written <= min(kept, prompt - cached)
    assert written == len(range(cached, min(kept, prompt)))


def test_written_tokens_by_hand() -> None:
    assert written_tokens(100, 0, 0) == 0
    assert written_tokens(100, 0, 64) == 64
    assert written_tokens(100, 48, 64) == 16
    assert written_tokens(100, 80, 64) == 0
    assert written_tokens(100, 16, 1000) == 84


@settings(max_examples=60, deadline=None)
@given(st.integers(-(10**20), 10**20))
def test_an_amount_as_text_is_exact(nusd: int) -> None:
    text = usd_text(nusd)
    assert Decimal(text) * NUSD == nusd
    assert len(text.partition(".")[2]) == 9
