"""What charts draw: counts that add up, names that cover nothing, lines with gaps."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.report.charts.bars import ShareBar, share_bars
from loadtest.report.charts.forest import Ratio, forest
from loadtest.report.charts.frame import LETTER, WIDTH, Axis, Frame
from loadtest.report.charts.histogram import Histogram, shares_up_to
from loadtest.report.charts.marks import Reference, band, end_labels, line, rows_for
from loadtest.report.charts.scale import linear
from loadtest.report.charts.stack import Layer, StackChart

FRAME = Frame(Axis(linear(0, 10), "{:g}".format), Axis(linear(0, 10), "{:g}".format))


@pytest.mark.parametrize("values", [[5.0] * 7, [0.0, 1.0, 2.0], [1.0, 1e5], list(range(1, 500))])
def test_a_histogram_counts_every_value_once(values: list[float]) -> None:
    html = Histogram("t", "s", "d", np.array(values, float), "{:g}".format, "{:g}".format, "c-1")
    told = re.findall(r"(\d+)\u00a0answers?,", html.html())
    assert sum(map(int, told)) == len(values)


def test_a_histogram_has_its_marks_within() -> None:
    html = Histogram(
        "t", "s", "d", np.array([1.0, 2.0, 3.0]), "{:g}".format, "{:g}".format, "c-1",
        [Reference(9.0, "promised 9", promised=True), Reference(2.0, "p50 2")],
    ).html()  # fmt: skip
    assert 'class="promise"' in html
    assert html.index("p50 2") < html.index("promised 9")


def test_shares_up_to_each_value_end_with_all_and_are_few() -> None:
    points = shares_up_to(np.array([3.0, 1.0, 2.0, 4.0]))
    assert points == [(1.0, 0.0), (1.0, 0.25), (2.0, 0.5), (3.0, 0.75), (4.0, 1.0)]
    many = shares_up_to(np.arange(100_000.0))
    assert len(many) <= 162
    assert many[-1] == (99_999.0, 1.0)
    assert all(abs(x / 100_000 - share) < 1e-4 for x, share in many[1:])


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 20)), max_size=6))
@settings(max_examples=50, deadline=None)
def test_names_of_references_cover_neither_names_nor_lines(
    places: list[tuple[float, int]],
) -> None:
    references = [Reference(at, "x" * length) for at, length in sorted(places)]
    rows = rows_for(references, FRAME.x.scale)
    ends = [FRAME.x.scale.at(each.value) * WIDTH * 0.85 for each in references]
    for later, (row, end) in enumerate(zip(rows, ends, strict=True)):
        start = end - LETTER * len(references[later].label)
        for earlier in range(later):
            assert rows[earlier] < row or ends[earlier] <= start


def test_a_line_is_interrupted_where_nothing_is_known() -> None:
    path = line(FRAME, [(0, 1), (1, 2), (2, math.nan), (3, 4), (4, math.nan)], "c-1")
    assert path.count("M") == 2
    assert "h0.01" in path  # A point on its own is a dot.
    drawn = band(FRAME, [(0, 1, 2), (1, 1, 3), (2, math.nan, 3), (3, 1, math.nan)], "c-1")
    assert (drawn.count("M"), drawn.count("Z")) == (1, 1)
    assert "nan" not in path + drawn


@given(st.lists(st.floats(0, 10), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_names_at_lines_ends_keep_apart_and_within(values: list[float]) -> None:
    labels = end_labels(FRAME, [(f"n{at}", y, "c-1") for at, y in enumerate(values)])
    places = sorted(float(found) for each in labels for found in re.findall(r' y="([^"]+)"', each))
    assert all(after - before >= 12.9 for before, after in pairwise(places))
    assert places[-1] <= FRAME.bottom_at + 5


def test_a_step_of_which_nothing_is_known_is_left_empty() -> None:
    chart = StackChart(
        "t", "s", "d", FRAME.x, FRAME.y, [0.0, 1.0, 2.0],
        [Layer("a", [1.0, 2.0], "c-1"), Layer("b", [3.0, math.nan], "c-2")],
    )  # fmt: skip
    assert re.findall(r'<path d="([^"]*)" class="area', chart.html())[0].count("M") == 1


@pytest.mark.parametrize(
    ("share", "low", "high", "word"),
    [
        (0.99, 0.97, 1.0, "✓ kept"),
        (0.96, 0.93, 0.98, "✓ kept, narrowly"),
        (0.94, 0.91, 0.97, "✗ missed, narrowly"),
        (0.80, 0.75, 0.85, "✗ missed"),
    ],
)
def test_a_bar_says_in_words_what_its_colour_does(
    share: float, low: float, high: float, word: str
) -> None:
    html = share_bars("t", "s", "d", [ShareBar("a" * 99, share, low, high, 0.95)])
    assert f"{word}</text>" in html
    assert "a" * 99 not in html.replace('data-tip="' + "a" * 99, "")
    assert "…" in html


def test_ratios_beyond_the_axis_are_drawn_at_its_edge() -> None:
    html = forest(
        "t", "s", "d",
        [Ratio("far", 1e4, None, None, "worse", "c-bad"), Ratio("near", 1.01, 0.99, 1.03, "", "c")],
    )  # fmt: skip
    centres = [float(each) for each in re.findall(r'cx="([^"]+)"', html)]
    assert centres[0] == WIDTH - 8
    assert WIDTH / 2 < centres[1] < WIDTH / 2 + 5
    assert ">1×</text>" in forest("t", "s", "d", [Ratio("a", 1.02, 1.01, 1.03, "", "c")])
