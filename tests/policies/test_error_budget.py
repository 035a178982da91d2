"""What a burning error budget makes of a weight."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.error_budget import LEAST, MOST, Burn, burn_rate, class_excess, next_factor

QUIET = Burn(0.0, 0.0, 100, 1000)


def burning(rate: float) -> Burn:
    return Burn(rate, rate, 100, 1000)


def settled(own: Burn, *others: Burn, before: float = 1.0) -> float:
    """The factor after a long time of the same."""
    for _ in range(60):
        before = next_factor(before, own, class_excess([own, *others]))
    return before


def test_a_burn_rate_of_one_spends_the_budget_in_its_time() -> None:
    assert burn_rate(95, 100, 0.95) == pytest.approx(1.0)
    assert burn_rate(80, 100, 0.95) == pytest.approx(4.0)
    assert burn_rate(100, 100, 0.95) == 0.0
    assert burn_rate(0, 0, 0.95) == 0.0


def test_who_burns_weighs_more_and_who_has_plenty_left_a_little_less() -> None:
    assert settled(burning(6.0), QUIET, QUIET) == pytest.approx(MOST)
    assert settled(QUIET, burning(6.0), QUIET) == pytest.approx(LEAST)
    assert 1.0 < settled(burning(1.5), QUIET) < 1.5


def test_who_has_used_some_of_its_budget_gives_none_away() -> None:
    assert settled(burning(0.8), burning(6.0)) == 1.0
    assert settled(burning(1.2), burning(6.0)) == 1.0


def test_burning_for_a_moment_or_long_ago_is_not_burning() -> None:
    assert settled(Burn(20.0, 0.5, 100, 1000), QUIET) == 1.0
    assert settled(Burn(0.2, 9.0, 100, 1000), QUIET) == 1.0


def test_a_few_answers_tell_nothing() -> None:
    assert settled(Burn(20.0, 20.0, 19, 19), QUIET) == 1.0
    assert settled(Burn(20.0, 20.0, 4, 500), QUIET) == 1.0
    assert settled(QUIET, Burn(20.0, 20.0, 19, 19)) == 1.0


def test_it_changes_by_steps() -> None:
    whole = class_excess([burning(20.0), QUIET])
    assert next_factor(1.0, burning(20.0), whole) == pytest.approx(1.1)
    assert next_factor(2.0, QUIET, class_excess([QUIET, QUIET])) == pytest.approx(2.0 / 1.1)


def test_it_does_not_go_to_and_fro_between_two_answers_at_the_bound() -> None:
    assert settled(burning(0.95), QUIET, before=1.0) == 1.0
    assert settled(burning(0.95), QUIET, before=1.02) > 1.0


bursts = st.builds(
    Burn, st.floats(0, 20), st.floats(0, 20), st.integers(0, 200), st.integers(0, 2000)
)


@given(bursts, st.lists(bursts, max_size=6), st.floats(LEAST, MOST))
@settings(max_examples=60, deadline=None)
def test_it_stays_within_its_bounds(own: Burn, others: list[Burn], before: float) -> None:
    after = next_factor(before, own, class_excess([own, *others]))
    assert LEAST - 1e-9 <= after <= MOST + 1e-9
    assert before / 1.1 - 1e-9 <= after <= before * 1.1 + 1e-9


@given(bursts, st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_where_all_are_alike_nothing_changes(own: Burn, others: int) -> None:
    assert next_factor(1.0, own, class_excess([own] * (others + 1))) == pytest.approx(1.0)
    assert settled(own, *[own] * others, before=1.5) == pytest.approx(1.0)


@given(
    st.floats(0, 20),
    st.floats(0, 20),
    st.lists(st.floats(0, 20), min_size=1, max_size=5),
    st.floats(0, 5),
    st.floats(LEAST, MOST),
)
@settings(max_examples=60, deadline=None)
def test_more_burning_is_never_a_smaller_weight(
    one: float, other: float, rest: list[float], more: float, before: float
) -> None:
    low, high = sorted((one, other))
    others = [burning(rate) for rate in rest]

    def factor(rate: float, beside: list[Burn]) -> float:
        own = burning(rate)
        return next_factor(before, own, class_excess([own, *beside]))

    assert factor(low, others) <= factor(high, others) + 1e-9
    worse = [burning(rate + more) for rate in rest]
    assert factor(one, worse) <= factor(one, others) + 1e-9
