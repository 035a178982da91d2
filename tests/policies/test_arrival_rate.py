"""What has come of each flow lately."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.arrival_rate import ArrivalRates


def test_a_steady_flow_has_the_rate_that_it_comes_at() -> None:
    rates = ArrivalRates()
    for turn in range(1000):
        rates.per_s("a", 5.0, turn * 0.1)
    assert rates.per_s("a", 0.0, 100.0) == pytest.approx(50.0, rel=0.01)
    assert rates.per_s("b", 0.0, 100.0) == 0.0
    assert len(rates) == 1


def test_what_was_long_ago_counts_less() -> None:
    rates = ArrivalRates()
    rates.per_s("a", 100.0, 0.0)
    found = [rates.per_s("a", 0.0, at_s) for at_s in (0.0, 10.0, 20.0, 1e4)]
    assert found == [pytest.approx(each, abs=1e-4) for each in (10.0, 3.6788, 1.3534, 0.0)]


def test_only_those_that_brought_something_last_are_remembered() -> None:
    rates = ArrivalRates()
    for number in range(1000):
        rates.per_s("first", 1.0, number)
        rates.per_s(number, 1.0, number)
        rates.per_s(-number, 0.0, number)
    assert len(rates) == 256
    assert rates.per_s("first", 0.0, 1000.0) > 0
    assert rates.per_s(999, 0.0, 1000.0) > 0
    assert rates.per_s(1, 0.0, 1000.0) == 0.0


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e4), st.floats(0, 30))))
def test_no_rate_is_negative_nor_above_all_that_has_come(steps) -> None:
    rates, now_s = ArrivalRates(), 0.0
    brought = [0.0] * 4
    for flow, more, pause_s in steps:
        now_s += pause_s
        brought[flow] += more
        assert 0.0 <= rates.per_s(flow, more, now_s) <= brought[flow] / 10 * (1 + 1e-9)
