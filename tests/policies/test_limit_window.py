"""Sub-buckets of a sliding window."""

from __future__ import annotations

import pytest

from policies.limit_window import Window, WindowShape

SHAPE = WindowShape(6_000_000, 6)


def window(at_s: float = 100.0) -> Window:
    return Window(SHAPE, SHAPE.bucket(at_s))


def test_what_came_counts_for_the_whole_span_and_less_than_a_bucket_longer() -> None:
    counted = window()
    counted.add(SHAPE.bucket(100.9), 1, 30)
    counted.slide(SHAPE.bucket(106.9))
    assert (counted.requests, counted.tokens) == (1, 30)
    counted.slide(SHAPE.bucket(107.0))
    assert counted.empty


def test_gone_is_when_sliding_drops_it() -> None:
    bucket = SHAPE.bucket(100.9)
    assert SHAPE.gone_s(bucket) == 107.0


def test_sliding_far_ahead_or_back() -> None:
    counted = window()
    counted.add(SHAPE.bucket(100.0), 2, 5)
    counted.slide(SHAPE.bucket(50.0))
    assert counted.requests == 2
    counted.slide(SHAPE.bucket(1e6))
    assert counted.empty
    counted.add(SHAPE.bucket(1e6), 1, 1)
    assert list(counted.content()) == [(1_000_000, 1, 1)]


def test_what_is_taken_back_comes_from_the_bucket_it_was_counted_in() -> None:
    counted = window()
    counted.add(100, 1, 10)
    counted.add(103, 1, 20)
    counted.add(100, 0, -4)
    assert list(counted.content()) == [(100, 1, 6), (103, 1, 20)]
    counted.slide(107)
    counted.add(100, -1, -6)
    assert list(counted.content()) == [(103, 1, 20)]


def test_which_bucket_makes_room() -> None:
    counted = window()
    for bucket, tokens in ((100, 10), (102, 20), (104, 30)):
        counted.add(bucket, 1, tokens)
    assert counted.bucket_freeing_requests(2) == 102
    assert counted.bucket_freeing_tokens(10) == 100
    assert counted.bucket_freeing_tokens(31) == 104
    assert counted.bucket_freeing_tokens(61) is None
    assert counted.newest_used() == 104


@pytest.mark.parametrize(("span_us", "buckets"), [(60, 61), (100, 3), (10, 0)])
def test_a_span_that_cannot_be_cut_evenly_is_refused(span_us: int, buckets: int) -> None:
    with pytest.raises(ValueError, match="whole number"):
        WindowShape(span_us, buckets)
