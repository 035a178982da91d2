"""What waits and what yields is the sum of what came and has not gone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.routing import Queued
from policies.work_by_priority import MOST_FLOWS, REST, WorkByPriority

FLOWS = [b"acme", b"beta"]

sequences = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(FLOWS), st.integers(0, 50)))


@settings(max_examples=40, deadline=None)
@given(sequences, st.integers(0, 20))
def test_all_that_came_goes_again(arrivals: list[tuple[int, bytes, int]], left: int) -> None:
    work = WorkByPriority()
    for priority, flow, tokens in arrivals:
        work.wait(1, tokens, priority, flow, 1.0, 0.0)
        work.run(1, priority)
    still = arrivals[:left]
    for priority, flow, tokens in arrivals[left:]:
        work.wait(-1, -tokens, priority, flow, 1.0, 0.0)
        work.run(-1, priority)
    places = sorted({(priority, flow) for priority, flow, _ in still})
    assert [each[:4] for each in work.queued()] == [
        (
            priority,
            sum(each[:2] == (priority, flow) for each in still),
            sum(each[2] for each in still if each[:2] == (priority, flow)),
            flow,
        )
        for priority, flow in places
    ]
    assert work.yielding() == tuple(
        (priority, sum(each[0] == priority for each in still))
        for priority in sorted({each[0] for each in still})
        if priority
    )


def test_a_flow_has_the_weight_that_its_newest_came_with() -> None:
    work = WorkByPriority()
    work.wait(1, 5, 0, b"acme", 2.0, 0.0)
    work.wait(1, 5, 0, b"acme", 3.0, 0.0)
    work.wait(-1, -5, 0, b"acme", 9.0, 0.0)
    assert work.queued() == (Queued(0, 1, 5, b"acme", 3.0, pytest.approx(1.0)),)


def test_of_many_flows_those_with_the_least_to_compute_are_taken_together() -> None:
    work = WorkByPriority()
    for tokens in range(MOST_FLOWS + 2):
        work.wait(1, tokens, 1, b"%d" % tokens, 0.5, 0.0)
    *named, rest = work.queued()
    assert {each.tokens for each in named} == set(range(2, MOST_FLOWS + 2))
    assert rest == Queued(1, 2, 1, REST, 1.0, pytest.approx(0.1))
