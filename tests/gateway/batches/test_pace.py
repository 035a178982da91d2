"""How fast lines are tried while something refuses them."""

from __future__ import annotations

from gateway.batches.pace import Pace


def test_pauses_double_and_then_it_goes_on_with_one_line():
    pace = Pace(0.5)
    now_s = 100.0
    waits = []
    for _ in range(9):
        waits.append(pace.refused(now_s, None))
        assert pace.allows(now_s, 0) == 0
        now_s += waits[-1]
        assert pace.allows(now_s, 0) == 1
        assert pace.allows(now_s, 1) == 0
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


def test_lines_that_ran_side_by_side_count_once():
    pace = Pace(0.5)
    assert [pace.refused(10.0, None) for _ in range(3)] == [0.5] * 3
    assert pace.refused(10.25, None) == 0.25


def test_what_the_refusal_says_is_waited_for_within_reason():
    assert Pace(0.5).refused(0.0, 7.0) == 7.0
    assert Pace(0.5).refused(0.0, 7000.0) == 60.0
    assert Pace(0.5).refused(0.0, 0.1) == 0.5


def test_each_answer_doubles_what_is_tried_until_nothing_is_left_of_it():
    pace = Pace(0.5)
    pace.refused(0.0, None)
    assert not pace.is_over(1.0)
    allowed = []
    while not pace.is_over(1.0):
        pace.answered()
        allowed.append(pace.allows(1.0, 0))
    assert allowed == [2**n for n in range(1, 11)]
    pace.refused(2.0, None)
    assert pace.refused(2.5, None) == 1.0  # the pauses began anew
    assert not pace.is_over(60.0)
    assert pace.is_over(700.0)
