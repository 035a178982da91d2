"""Stop strings are found whatever the chunks, and nothing else is held back or lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.stop_strings import StopMatcher

LETTERS = st.text(alphabet="ab\u4e16", max_size=14)
STOPS = st.lists(st.text(alphabet="ab\u4e16", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The whole text at once: cut at the earliest start, the shortest stop of those there."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


def streamed(chunks: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(tuple(stops))
    shown = ""
    longest = max(map(len, stops), default=0)
    for index, chunk in enumerate(chunks):
        emitted, matched = matcher.feed(chunk)
        shown += emitted
        assert matched == matcher.matched
        if matched:
            return shown, matched
        fed = "".join(chunks[: index + 1])
        assert len(fed) - len(shown) <= max(longest - 1, 0)
        assert fed.startswith(shown)
    return shown + matcher.flush(), matcher.matched


@settings(max_examples=400, deadline=None)
@given(chunks=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_streamed_equals_whole_text_search(chunks, stops):
    assert streamed(chunks, stops) == naive("".join(chunks), stops)


def test_look_alike_is_held_only_while_it_could_become_a_stop():
    matcher = StopMatcher(("END!",))
    assert matcher.feed("the EN") == ("the ", None)
    assert matcher.feed("D") == ("", None)
    assert matcher.feed("LESS") == ("ENDLESS", None)
    assert matcher.flush() == ""


def test_stop_across_chunks_is_not_leaked_and_the_rest_is_dropped():
    matcher = StopMatcher(("\n\nHuman:",))
    assert matcher.feed("Sure.\n") == ("Sure.", None)
    assert matcher.feed("\nHum") == ("", None)
    assert matcher.feed("an: more") == ("", "\n\nHuman:")


def test_held_tail_comes_out_at_the_end():
    matcher = StopMatcher(("###",))
    assert matcher.feed("a ##") == ("a ", None)
    assert matcher.flush() == "##"
    assert matcher.matched is None


def test_a_stop_inside_a_held_beginning_counts_at_the_end():
    matcher = StopMatcher(("abcd", "bc"))
    assert matcher.feed("xabc") == ("x", None)
    assert matcher.flush() == "a"
    assert matcher.matched == "bc"


def test_no_stops_hold_nothing():
    matcher = StopMatcher(())
    assert matcher.feed("anything") == ("anything", None)
    assert matcher.flush() == ""


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(("a", ""))
