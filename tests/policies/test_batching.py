"""Batches: how many, when, and when to ask again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.batching import (
    CONTINUOUS,
    DYNAMIC_WINDOW_S,
    STATIC_WINDOW_S,
    Batching,
    BatchingMode,
)

BATCHES = st.builds(
    Batching,
    st.sampled_from([BatchingMode.STATIC, BatchingMode.DYNAMIC]),
    st.integers(1, 20),
    st.none() | st.floats(0, 100),
)
TIMES = st.floats(0, 1e6)


def test_continuous_batching_lets_everybody_in_whatever_runs():
    assert CONTINUOUS.admits(0.0, 7, 0.0, 100) == 7
    assert CONTINUOUS.next_due_s(7, 0.0, 100) is None


def test_nobody_joins_a_batch_that_runs():
    for mode in (BatchingMode.STATIC, BatchingMode.DYNAMIC):
        batching = Batching(mode, size=4)
        assert batching.admits(1e9, 4, 0.0, 1) == 0
        assert batching.next_due_s(3, 0.0, 1) is None
        assert batching.admits(0.0, 9, 0.0, 0) == 4


@pytest.mark.parametrize(
    ("mode", "window_s", "expected_s"),
    [
        (BatchingMode.DYNAMIC, None, DYNAMIC_WINDOW_S),
        (BatchingMode.STATIC, None, STATIC_WINDOW_S),
        (BatchingMode.STATIC, 0.5, 0.5),
        (BatchingMode.DYNAMIC, 0.0, 0.0),
    ],
)
def test_fewer_go_when_the_window_is_over(mode, window_s, expected_s):
    batching = Batching(mode, size=4, window_s=window_s)
    due_s = 100.0 + expected_s
    assert batching.next_due_s(3, 100.0, 0) == due_s
    assert batching.admits(math.nextafter(due_s, 0), 3, 100.0, 0) == 0
    assert batching.admits(due_s, 3, 100.0, 0) == 3


@settings(max_examples=50, deadline=None)
@given(BATCHES, TIMES, TIMES, st.integers(0, 40), st.integers(0, 3))
def test_no_batch_is_larger_than_its_size_or_missed(batching, now_s, eldest_s, waiting, running):
    admitted = batching.admits(now_s, waiting, eldest_s, running)
    assert 0 <= admitted <= min(waiting, batching.size)
    next_s = batching.next_due_s(waiting, eldest_s, running)
    if next_s is not None:
        assert batching.admits(next_s, waiting, eldest_s, running) == waiting
        assert (admitted > 0) == (now_s >= next_s)
    elif waiting and not running:
        assert admitted == batching.size


@settings(max_examples=50, deadline=None)
@given(BATCHES, st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 9)), min_size=1, max_size=30))
def test_everybody_gets_into_a_batch_and_none_overlap(batching, work):
    """Driven by its own answers: asked when somebody comes, when a batch ends and when it says."""
    arrivals, at_s = [], 0.0
    for gap_s, _ in work:
        at_s += gap_s
        arrivals.append(at_s)
    now_s, done, batches = 0.0, 0, []
    while done < len(arrivals):
        waiting = sum(arrived <= now_s for arrived in arrivals) - done
        admitted = batching.admits(now_s, waiting, arrivals[done], 0)
        if admitted:
            end_s = now_s + max(length for _, length in work[done : done + admitted])
            batches.append((now_s, end_s, admitted))
            done, now_s = done + admitted, end_s
            continue
        came = [arrived for arrived in arrivals if arrived > now_s]
        due_s = batching.next_due_s(waiting, arrivals[done], 0)
        now_s = min([*came[:1], *([] if due_s is None else [due_s])])
    assert sum(count for *_, count in batches) == len(arrivals)
    begun, free_s = 0, 0.0
    for start_s, end_s, count in batches:
        assert start_s >= free_s
        assert start_s <= max(free_s, batching.due_s(arrivals[begun]))
        begun, free_s = begun + count, end_s


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match="a batch of 0"):
        Batching(BatchingMode.DYNAMIC, size=0)
    for window_s in (-1.0, math.nan):
        with pytest.raises(ValueError, match="a window of"):
            Batching(BatchingMode.DYNAMIC, window_s=window_s)
