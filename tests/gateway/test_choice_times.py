"""Whose time it is that passes between two tokens of an answer with several choices."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.choice_times import ChoiceTimes


@dataclass
class Grown:
    """A choice that began then."""

    began_s: float
    text: Any = field(default_factory=lambda: SimpleNamespace(generated=0))

    @property
    def receipts(self) -> list[Any]:
        """Lost before it began, begun, and moved."""
        return [SimpleNamespace(began_s=at_s) for at_s in (None, self.began_s, 99.0)]


def note(times: ChoiceTimes, choices: list[Any], place: int, made_s: float, tokens: int = 1):
    choices[place].text.generated += tokens
    times.note(choices, made_s)


def test_a_short_choice_does_not_make_a_long_one_slow():
    times, choices = ChoiceTimes(), [Grown(1.0), Grown(1.0)]
    for place in (0, 1):
        note(times, choices, place, 1.0)
    for step in range(1, 101):
        note(times, choices, 1, 1.0 + step * 0.01)
    assert times.tpot_s(choices) == pytest.approx(0.01)


def test_one_that_begins_late_was_not_slow_before():
    times, choices = ChoiceTimes(), [Grown(1.0), Grown(50.0)]
    note(times, choices, 0, 1.0)
    note(times, choices, 0, 2.0)
    note(times, choices, 1, 50.0)
    note(times, choices, 1, 53.0, tokens=3)
    assert times.tpot_s(choices) == pytest.approx((1.0 + 3.0) / (1 + 3))


def test_single_tokens_have_nothing_between_them():
    times, choices = ChoiceTimes(), [Grown(1.0), Grown(1.0)]
    assert times.tpot_s(choices) is None
    note(times, choices, 1, 2.0)
    assert times.tpot_s(choices) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=60))
def test_whatever_the_order_it_is_the_mean_of_all_gaps(outputs):
    """Outputs without a token that counts, as behind a stop string, say nothing."""
    times, choices = ChoiceTimes(), [Grown(1.0) for _ in range(5)]
    last_s = [1.0] * 5
    for step, (place, tokens) in enumerate(outputs):
        note(times, choices, place, 2.0 + step, tokens)
        if tokens:
            last_s[place] = 2.0 + step
    counts = [choice.text.generated for choice in choices]
    gaps = sum(max(0, count - 1) for count in counts)
    spans_s = sum(at_s - 1.0 for at_s, count in zip(last_s, counts, strict=True) if count > 1)
    assert times.tpot_s(choices) == (pytest.approx(spans_s / gaps) if gaps else None)
