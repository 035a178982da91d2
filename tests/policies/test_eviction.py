"""Eviction by value: what counts, in which direction, and what floors and quotas allow."""

from hypothesis import given
from hypothesis import strategies as st

from policies.eviction import (
    advance_clock,
    blocks_over_quota,
    blocks_to_give,
    eviction_order,
    eviction_priority,
    most_kept,
    on_pool_clock,
)

times = st.floats(0.0, 1e6)
small = st.integers(0, 100)


def test_hits_and_recompute_time_multiply():
    assert eviction_priority(0.0, 0.5, 0) == 0.5
    assert eviction_priority(0.0, 0.5, 3) == 2.0
    assert eviction_priority(10.0, 0.5, 3) == 12.0


def test_an_old_favourite_falls_behind_as_the_clock_rises():
    favourite = eviction_priority(0.0, 1.0, 9)
    assert eviction_priority(8.0, 1.0, 0) < favourite < eviction_priority(9.5, 1.0, 0)


@given(clock=times, priority=times)
def test_the_clock_never_goes_back(clock: float, priority: float):
    assert advance_clock(clock, priority) == max(clock, priority)


def test_kept_blocks_stand_behind_all_others_and_expire_in_order():
    plain = eviction_order(1e9, keep_until_s=5.0, now_s=5.0, turn=9)
    soon = eviction_order(3.0, keep_until_s=6.0, now_s=5.0, turn=1)
    later = eviction_order(1.0, keep_until_s=7.0, now_s=5.0, turn=2)
    assert plain < soon < later


def test_equal_values_go_least_recently_used_first():
    first = eviction_order(1.0, 0.0, 5.0, turn=1)
    assert first < eviction_order(1.0, 0.0, 5.0, turn=2)
    assert first < eviction_order(1.1, 0.0, 5.0, turn=0)


def test_a_tenant_ahead_of_the_pool_is_compared_on_the_pools_clock():
    ahead = eviction_order(eviction_priority(1.0 + 4.0, 1.0, 0), 0.0, 5.0, turn=1)
    assert on_pool_clock(ahead, 4.0) == eviction_order(2.0, 0.0, 5.0, turn=1)


@given(published=small, evictable=small, floor=small)
def test_giving_never_goes_below_the_floor(published: int, evictable: int, floor: int):
    given_up = blocks_to_give(published, evictable, floor)
    assert 0 <= given_up <= evictable
    assert given_up == 0 or published - given_up >= floor
    assert given_up in (0, evictable) or published - given_up == floor


def test_quota_bounds_only_where_there_is_one():
    assert blocks_over_quota(7, None) == 0
    assert blocks_over_quota(7, 5) == 2
    assert blocks_over_quota(3, 5) == 0
    assert blocks_over_quota(3, 0) == 3


def test_half_of_a_pool_can_be_kept():
    assert [most_kept(blocks) for blocks in (1, 2, 7)] == [0, 1, 3]
