"""Server-sent events out of pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.wire.events import EventSplitter

STREAM = (
    b": hi\r\n\r\ndata: one\n\nevent: x\r\ndata: two\r\ndata:lines\r\n\r\nid: 7\n\ndata: three\n\n"
)
EVENTS = [b"one", b"two\nlines", b"three"]


@given(cuts=st.sets(st.integers(1, len(STREAM) - 1)))
@settings(max_examples=40, deadline=None)
def test_events_are_the_same_wherever_the_body_is_cut(cuts: set[int]) -> None:
    splitter = EventSplitter()
    found = [
        event
        for start, end in pairwise([0, *sorted(cuts), len(STREAM)])
        for event in splitter.feed(STREAM[start:end])
    ]

    assert found == EVENTS


@pytest.mark.parametrize("piece", [b"data: half", b"data: half\n", b"", b"\n\n", b"event: x\n\n"])
def test_what_has_not_ended_or_has_no_data_is_no_event(piece: bytes) -> None:
    assert EventSplitter().feed(piece) == []


def test_a_line_that_comes_in_very_many_pieces_is_read_in_time_that_grows_with_it() -> None:
    splitter = EventSplitter()
    pieces = 40_000
    assert splitter.feed(b"data: ") == []
    for _ in range(pieces):
        assert splitter.feed(b"x" * 512) == []

    assert splitter.feed(b"\n\ndata: y\n\n") == [b"x" * 512 * pieces, b"y"]
