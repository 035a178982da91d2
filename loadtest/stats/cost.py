"""What answers cost: by the time of a machine that is rented by the hour, or by a price list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal, InvalidOperation

from loadtest.record import Outcome, Record
from policies.pricing import Price

_SECONDS_OF_AN_HOUR = 3600
_PRICED = ("input", "cached_input", "output")


def usd_per_million_tokens(usd_per_hour: float, tokens_per_s: float) -> float:
    """What a million tokens cost on a machine that makes so many per second. Raises ValueError
    for a rate that is not positive."""
    return usd_per_thousand(usd_per_hour, tokens_per_s) * 1e3


def usd_per_thousand(usd_per_hour: float, per_s: float) -> float:
    """What a thousand of anything, such as prefill requests, cost on a machine that does so many
    per second. Raises ValueError for a rate that is not positive."""
    return usd_per_unit(usd_per_hour, per_s) * 1e3


def usd_per_unit(usd_per_hour: float, per_s: float) -> float:
    """What one request costs on a machine that answers so many per second. Raises ValueError for a
    rate that is not positive."""
    if not per_s > 0:
        raise ValueError(f"at {per_s:g} per second there is nothing to divide a cost among")
    return usd_per_hour / _SECONDS_OF_AN_HOUR / per_s


def parse_price(text: str) -> Price:
    """From "input=0.1,cached_input=0.01,output=0.4", US dollars per million tokens, in any order.
    What is left out is free, but `cached_input` costs what `input` does. Raises ValueError with one
    line."""
    found: dict[str, Decimal] = {}
    for part in text.split(","):
        name, equals, amount = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _PRICED:
            raise ValueError(
                f"{part.strip()!r} is no price: {', '.join(_PRICED)} have one, as in input=0.1"
            )
        if name in found:
            raise ValueError(f"{name} has two prices")
        found[name] = _usd(name, amount)
    found.setdefault("cached_input", found.get("input", Decimal(0)))
    return Price(**found)


def priced(records: Iterable[Record], price: Price) -> list[Record]:
    """The records with what their tokens cost by the price, where the server answered whole but did
    not say what it charges. Tokens of which it did not say that they were cached were computed."""
    return [_priced(record, price) for record in records]


def _priced(record: Record, price: Price) -> Record:
    if record.price_nusd is not None or record.outcome not in (Outcome.OK, Outcome.WRONG):
        return record
    cached = min(record.cached_tokens or 0, record.prompt_tokens)
    nusd = price.request_nusd(
        uncached_tokens=record.prompt_tokens - cached,
        cached_tokens=cached,
        output_tokens=record.output_tokens,
    )
    return replace(record, price_nusd=nusd)


def _usd(name: str, amount: str) -> Decimal:
    try:
        usd = Decimal(amount)
    except InvalidOperation:
        usd = Decimal("NaN")
    if not usd.is_finite() or usd < 0:
        raise ValueError(f"{name} costs an amount of US dollars, not {amount!r}")
    return usd
