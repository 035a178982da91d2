"""Virtual token counters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.fairness import TokenCounters


def let_in(counters: TokenCounters, flow: bytes, units: float, weight: float = 1.0) -> None:
    counters.begin(flow)
    counters.charge(flow, units, weight)


def test_units_count_by_weight():
    counters = TokenCounters()
    counters.wait(b"a")
    counters.wait(b"b")
    let_in(counters, b"a", 100, weight=4)
    let_in(counters, b"b", 100)
    assert (counters.count(b"a"), counters.count(b"b")) == (25.0, 100.0)


def test_what_is_given_back_counts_no_more():
    counters = TokenCounters()
    counters.wait(b"a")
    let_in(counters, b"a", 100, weight=2)
    counters.charge(b"a", -40, 2)
    assert counters.count(b"a") == 30.0


def test_who_comes_back_starts_where_the_others_are():
    counters = TokenCounters()
    for flow in (b"a", b"b"):
        counters.wait(flow)
    let_in(counters, b"b", 10)
    counters.wait_no_more(b"b")
    for _ in range(5):
        let_in(counters, b"a", 100)
    counters.wait(b"b")
    assert counters.count(b"b") == counters.time == 400.0
    assert counters.count(b"a") == 500.0


def test_debt_stays_with_who_comes_back():
    counters = TokenCounters()
    counters.wait(b"a")
    let_in(counters, b"a", 1000)
    counters.wait_no_more(b"a")
    counters.wait(b"b")
    counters.wait(b"a")
    assert counters.count(b"a") == 1000.0
    assert counters.count(b"b") == 0.0


def test_flows_that_left_nothing_behind_are_forgotten():
    counters = TokenCounters(keep=10)
    counters.wait(b"busy")
    for index in range(1000):
        flow = b"%d" % index
        counters.wait(flow)
        let_in(counters, flow, 5)
        counters.wait_no_more(flow)
        let_in(counters, b"busy", 10)
    assert len(counters) <= 21
    assert counters.count(b"busy") == 10_000.0


def test_of_many_in_debt_those_with_the_least_are_forgotten():
    counters = TokenCounters(keep=10)
    for index in range(100):
        flow = b"%d" % index
        counters.wait(flow)
        counters.charge(flow, 1000 - index, 1.0)
        counters.wait_no_more(flow)
    assert len(counters) <= 21
    assert counters.count(b"0") == 1000.0
    assert counters.count(b"60") == counters.time == 0.0


def test_who_waits_is_never_forgotten():
    counters = TokenCounters(keep=2)
    for index in range(50):
        counters.wait(b"%d" % index)
        counters.charge(b"%d" % index, index + 1, 1.0)
    counters.wait(b"gone")
    counters.wait_no_more(b"gone")
    assert [counters.count(b"%d" % index) for index in range(50)] == list(range(1, 51))


def test_answers_are_expected_as_long_as_the_flows_last_ones():
    counters = TokenCounters()
    assert counters.expected_answer_tokens(b"a", 1000) == 64.0
    assert counters.expected_answer_tokens(b"a", 8) == 8
    for _ in range(40):
        counters.learn_answer(b"a", 300)
    assert counters.expected_answer_tokens(b"a", 1000) == pytest.approx(300)
    assert counters.expected_answer_tokens(b"a", 100) == 100
    assert 250 < counters.expected_answer_tokens(b"new", 1000) < 300


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6),
    st.lists(st.integers(1, 200), min_size=50, max_size=300),
)
def test_backlogged_flows_are_never_more_than_one_request_apart(weights, requests):
    """The least counter goes next: the bound of the paper, with requests charged as they begin."""
    counters = TokenCounters()
    flows = [b"%d" % index for index in range(len(weights))]
    for flow in flows:
        counters.wait(flow)
    for units in requests:
        index = min(range(len(flows)), key=lambda each: counters.count(flows[each]))
        let_in(counters, flows[index], units, weights[index])
        counts = [counters.count(flow) for flow in flows]
        assert max(counts) - min(counts) <= 200 / min(weights) + 1e-6
        assert counters.time <= min(counts) + 200 / min(weights)
