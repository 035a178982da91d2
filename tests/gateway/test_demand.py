"""What a request reserves, and what it is found to have used."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block import Tier
from gateway.demand import Ask, demand_of, used_tokens
from gateway.dispatch.prefix import UNKNOWN
from gateway.wire.usage import Usage
from policies.limits import Demand
from policies.pricing import FREE, Price
from policies.routing import RouteRequest
from tests.gateway.stage import tenant

PRICE = Price(input=Decimal(1), cached_input=Decimal("0.1"), output=Decimal(4))


def ask(prompt: int, longest: int, *, choices: int = 1, says_length: bool = True) -> Ask:
    return Ask(RouteRequest(prompt, longest), UNKNOWN, choices, says_length)


def test_an_answer_of_a_given_length_is_reserved_in_full():
    demand = demand_of([ask(100, 50)], [0], tenant(), PRICE)
    assert demand == Demand(150, 150, 300_000, 300_000)


def test_what_is_expected_to_be_cached_counts_less_and_costs_less():
    demand = demand_of([ask(100, 50)], [60], tenant(cached_weight=0.25), PRICE)
    assert demand.tokens == 40 + 15 + 50
    assert demand.cost_nusd == 40 * 1000 + 60 * 100 + 50 * 4000


def test_the_last_token_of_a_prompt_is_computed_whatever_is_cached():
    assert demand_of([ask(100, 1)], [100], tenant(cached_weight=0), FREE).tokens == 2


def test_an_answer_of_open_length_needs_one_token_and_wants_about_twice_the_usual():
    open_ended = [ask(100, 2000, says_length=False)]
    assert demand_of(open_ended, [0], tenant(), FREE) == Demand(101, 612)
    assert demand_of(open_ended, [0], tenant(), FREE, usual_answer_tokens=300) == Demand(101, 700)
    assert demand_of(open_ended, [0], tenant(), FREE, usual_answer_tokens=1) == Demand(101, 164)
    short = [ask(100, 20, says_length=False)]
    assert demand_of(short, [0], tenant(), FREE) == Demand(101, 120)


def test_choices_share_their_prompt_and_prompts_add_up():
    demand = demand_of([ask(100, 10, choices=3), ask(50, 10, choices=3)], [0, 0], tenant(), FREE)
    assert demand.tokens == 150 + 60


def test_what_is_to_be_kept_is_reserved_at_its_price():
    kept = Ask(RouteRequest(100, 50), UNKNOWN, kept_tokens=80)
    price = replace(PRICE, cache_write=Decimal(2))
    without = demand_of([ask(100, 50)], [0], tenant(), price)
    assert demand_of([kept], [0], tenant(), price).cost_nusd == without.cost_nusd + 80 * 2000
    found = demand_of([ask(100, 50)], [60], tenant(), price)
    assert demand_of([kept], [60], tenant(), price).cost_nusd == found.cost_nusd + 20 * 2000


def test_a_demand_beyond_all_bounds_is_one_that_counters_can_hold():
    endless = demand_of(
        [ask(100, 1 << 31, choices=1 << 18)], [0], tenant(), replace(PRICE, output=Decimal(10**6))
    )
    assert endless.cost_nusd == endless.wanted_cost_nusd == 1 << 53


def test_batches_pay_less():
    whole = demand_of([ask(100, 50)], [0], tenant(), PRICE)
    batch = demand_of([ask(100, 50)], [0], tenant(), PRICE, batch=True)
    assert 2 * batch.cost_nusd == whole.cost_nusd
    assert batch.tokens == whole.tokens


@given(
    prompt=st.integers(1, 5000),
    longest=st.integers(1, 5000),
    cached=st.integers(0, 6000),
    weight=st.floats(0, 1),
    says_length=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_what_must_fit_is_never_more_than_what_is_wanted_nor_than_what_can_be_used(
    prompt: int, longest: int, cached: int, weight: float, says_length: bool
):
    owner = tenant(cached_weight=weight)
    demand = demand_of([ask(prompt, longest, says_length=says_length)], [cached], owner, PRICE)
    assert 0 < demand.tokens <= demand.wanted_tokens <= prompt + longest
    assert 0 < demand.cost_nusd <= demand.wanted_cost_nusd
    served = min(cached, prompt - 1)
    most = Usage(prompt, {Tier.DEVICE: served}, longest)
    if says_length:
        # a prediction that comes true is settled at what was reserved
        assert used_tokens(most, owner) == demand.tokens
