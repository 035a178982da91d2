"""Due times and victims."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.scheduling import PATIENCE_S, Rank, due_s, pick_victim


def test_a_deadline_counts_until_it_has_passed():
    assert due_s(100.0, 102.0, 101.0) == 102.0
    assert due_s(100.0, 102.0, 102.5) == 100.0 + PATIENCE_S
    assert due_s(100.0, None, 101.0) == 100.0 + PATIENCE_S


def test_a_deadline_that_is_far_off_makes_nobody_wait_longer_than_none():
    assert due_s(100.0, 100.0 + 86_400, 100.0) == due_s(100.0, None, 100.0)


@given(
    st.floats(0, 1e6),
    st.none() | st.floats(0, 100),
    st.floats(0, 100),
    st.none() | st.floats(0, 100),
    st.floats(0, 100),
)
def test_who_came_a_patience_earlier_is_never_behind(arrived, first, later, second, since):
    """Nobody starves within a flow: those that can still come before are few."""
    second_arrived = arrived + PATIENCE_S + later
    now = second_arrived + since
    deadline = None if first is None else arrived + first
    second_deadline = None if second is None else second_arrived + second
    assert due_s(arrived, deadline, now) <= due_s(second_arrived, second_deadline, now) + 1e-6


def test_the_victim_is_the_least_urgent_then_the_newest():
    assert pick_victim([Rank(0, 1), Rank(1, 0), Rank(0, 9)]) == 1
    assert pick_victim([Rank(0, 1), Rank(0, 9), Rank(0, 3)]) == 1


def test_nobody_to_pick_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        pick_victim([])
