"""The news as bytes and back."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.news.fleet_news import OwnLoad
from gateway.news.messages import (
    Decision,
    LoadNews,
    RoutedNews,
    pack_loads,
    pack_routed,
    unpack_loads,
    unpack_routed,
)

LINK = st.binary(min_size=16, max_size=16)
NAME = st.text(max_size=20)
DECISION = st.builds(
    Decision,
    replica=NAME,
    after=st.none() | LINK,
    links=st.lists(LINK, max_size=5).map(tuple),
    more=st.booleans(),
)
ROUTED = st.builds(
    RoutedNews,
    generation=st.integers(0, 2**32 - 1),
    decisions=st.lists(DECISION, max_size=5).map(tuple),
)
FIGURE = st.integers(0, 2**64 - 1)
LOADS = st.builds(
    LoadNews,
    loads=st.dictionaries(NAME, st.builds(OwnLoad, FIGURE, FIGURE, FIGURE, FIGURE), max_size=5),
    leaving=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(ROUTED, LOADS)
def test_both_kinds_come_back_as_they_were(routed: RoutedNews, loads: LoadNews) -> None:
    assert unpack_routed(pack_routed(routed)) == routed
    assert unpack_loads(pack_loads(loads)) == loads


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=120), ROUTED.filter(lambda news: bool(news.decisions)), st.data())
def test_what_is_no_message_is_a_value_error_and_nothing_else(
    noise: bytes, routed: RoutedNews, data: st.DataObject
) -> None:
    for unpack in (unpack_routed, unpack_loads):
        with suppress(ValueError):
            unpack(noise)
    last = routed.decisions[-1]
    whole = pack_routed(routed)
    # within the last decision: what ends between two of them is a shorter message
    size = len(whole) - len(pack_routed(RoutedNews(0, routed.decisions[:-1])))
    cut = data.draw(st.integers(1, size - 1))
    with pytest.raises(ValueError, match="too early"):
        unpack_routed(whole[:-cut])
    assert last in unpack_routed(whole).decisions


def test_figures_that_cannot_be_are_bounded() -> None:
    (load,) = unpack_loads(pack_loads(LoadNews({"r": OwnLoad(-3, 2**70, 1, 0)}))).loads.values()
    assert load == OwnLoad(0, 2**64 - 1, 1, 0)


@pytest.mark.parametrize(
    "decision",
    [
        Decision("r", None, (b"short",)),
        Decision("r", b"short", ()),
        Decision("r" * 70_000, None, ()),
    ],
)
def test_what_cannot_be_packed_is_said(decision: Decision) -> None:
    with pytest.raises(ValueError, match=r"16 bytes|too long"):
        pack_routed(RoutedNews(0, (decision,)))
