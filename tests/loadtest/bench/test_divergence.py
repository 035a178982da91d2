"""Counting where two number formats disagree."""

import pytest

from loadtest.bench.divergence import Divergence, _Choice, compare
from loadtest.bench.report import divergence_notes


def test_counts_answers_and_positions():
    found = compare(["ab", "cd"], [["a", "b"], ["c", "d"]], ["ab", "cx"], [["a", "b"], ["c", "x"]])
    assert found == Divergence(2, 1, 4, 1)
    assert "1 of 2 greedy answers" in divergence_notes(found)[0]
    assert "1 of 4 positions (25.00%)" in divergence_notes(found)[1]


def test_positions_must_be_the_same():
    with pytest.raises(ValueError, match="shorter"):
        compare(["ab"], [["a", "b"]], ["ab"], [["a"]])


def test_only_positions_past_the_prompt_count():
    choice = _Choice("xyz", [0, 1, 2], [None, {"y": -1.0, "q": -0.5}, {"z": -0.1, "k": -3.0}])
    assert choice.firsts_after(1) == ["q", "z"]
    assert choice.firsts_after(2) == ["z"]
