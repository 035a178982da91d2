"""One pattern for many strings finds what trying each of them would."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.alternatives import any_of

WORDS = st.text(alphabet="ab<|.", min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(words=st.lists(WORDS, max_size=8), text=st.text(alphabet="ab<|.", max_size=30))
def test_finds_the_longest_at_the_first_place(words, text):
    longest_first = sorted(words, key=len, reverse=True)
    tried_one_by_one = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    assert re.findall(any_of(words), text) == tried_one_by_one.findall(text)


def test_no_strings_match_nothing():
    assert re.search(any_of([]), "") is None
