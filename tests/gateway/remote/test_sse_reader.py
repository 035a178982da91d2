"""Events from bytes that are cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.remote.sse_reader import SseReader

lines = st.text(
    alphabet=st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(lines, min_size=1, max_size=3), max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.booleans(),
    st.data(),
)
def test_the_same_events_however_they_are_cut(wanted, end, bom, data):
    text = "\ufeff" if bom else ""
    for event in wanted:
        text += f": comment{end}event: e{end}"
        text += "".join(f"data: {line}{end}" for line in event) + end
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    reader, found = SseReader(), []
    for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        found += reader.feed(raw[start:stop])
    assert found == ["\n".join(event).encode() for event in wanted]


def test_no_space_is_needed_and_one_is_taken_away():
    assert SseReader().feed(b"data:a\n\ndata:  b\n\ndata\n\n") == [b"a", b" b"]


def test_an_error_line_is_an_error_event():
    assert SseReader().feed(b'error: {"code":500}\n\n') == [b'{"error":{"code":500}}']


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 64, b"data: xxxxxxxx\n" * 8])
def test_an_event_may_not_grow_without_end(piece):
    with pytest.raises(ApiError) as refusal:
        SseReader(limit_bytes=50).feed(piece)
    assert refusal.value.status == 502
