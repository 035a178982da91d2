"""Budget shares and victims."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.scheduling import Rank, pick_victim, share_budget


def test_decodes_are_served_before_an_older_prefill():
    assert share_budget(10, [50, 1, 1]) == [8, 1, 1]


def test_prefills_are_first_come_first_served():
    assert share_budget(10, [6, 6, 6]) == [6, 4, 0]


@given(st.integers(1, 100), st.lists(st.integers(1, 60), max_size=20))
def test_shares_use_the_budget_and_no_more(budget, wanted):
    shares = share_budget(budget, wanted)
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) == min(budget, sum(wanted))


def test_the_victim_is_the_least_urgent_then_the_newest():
    assert pick_victim([Rank(0, 1), Rank(1, 0), Rank(0, 9)]) == 1
    assert pick_victim([Rank(0, 1), Rank(0, 9), Rank(0, 3)]) == 1


def test_nobody_to_pick_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        pick_victim([])
