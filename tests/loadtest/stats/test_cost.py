"""Costs of worked numbers, and price lists."""

from __future__ import annotations

from decimal import Decimal

import pytest

from loadtest.record import Outcome, Record
from loadtest.stats.cost import (
    parse_price,
    priced,
    usd_per_million_tokens,
    usd_per_thousand,
    usd_per_unit,
)
from policies.pricing import Price


def test_a_machine_of_two_dollars_an_hour() -> None:
    assert usd_per_million_tokens(2, tokens_per_s=100) == pytest.approx(5.56, abs=0.005)
    assert usd_per_thousand(2, per_s=100 / 60) == pytest.approx(0.33, abs=0.005)
    assert usd_per_unit(3.6, per_s=1) == pytest.approx(0.001)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_nothing_done_has_no_cost_per_unit(rate: float) -> None:
    with pytest.raises(ValueError, match="nothing to divide"):
        usd_per_unit(2, rate)


def test_a_price_list_is_read() -> None:
    given = parse_price("output=0.4, input=0.1 ,cached_input=0.01")

    assert given == Price(Decimal("0.1"), Decimal("0.01"), Decimal("0.4"))


def test_cached_input_costs_what_input_does_unless_it_is_said() -> None:
    assert parse_price("input=0.1").cached_input == Decimal("0.1")
    assert parse_price("output=1").cached_input == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is no price"),
        ("input", "'input' is no price"),
        ("storage=1", "'storage=1' is no price"),
        ("input=1,input=2", "input has two prices"),
        ("input=cheap", "input costs an amount of US dollars, not 'cheap'"),
        ("output=-1", "not '-1'"),
        ("output=inf", "not 'inf'"),
        ("output=nan", "not 'nan'"),
    ],
)
def test_what_is_no_price_list_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_price(text)


def test_records_without_a_charge_are_priced() -> None:
    def record(outcome: Outcome, cached: int | None, charged: int | None = None) -> Record:
        return Record(0, 0, 0, 1, outcome, 1000, 10, cached_tokens=cached, price_nusd=charged)

    found = priced(
        [
            record(Outcome.OK, 600),
            record(Outcome.WRONG, None),
            record(Outcome.OK, 600, charged=7),
            record(Outcome.BROKEN, None),
        ],
        parse_price("input=0.1,cached_input=0.01,output=0.4"),
    )

    # 400 x 0.1 + 600 x 0.01 + 10 x 0.4 = 50 millionths of a dollar; 1000 x 0.1 + 4 = 104.
    assert [one.price_nusd for one in found] == [50_000, 104_000, 7, None]


def test_more_cached_than_there_was_makes_nothing_cheaper_than_free() -> None:
    record = Record(0, 0, 0, 1, Outcome.OK, prompt_tokens=10, output_tokens=1, cached_tokens=99)
    (found,) = priced([record], parse_price("input=1,cached_input=0.1"))

    assert found.price_nusd == 1000
