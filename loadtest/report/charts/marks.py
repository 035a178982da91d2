"""What is drawn within a frame: lines, bands, dots, and references with their names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadtest.report.charts.frame import LETTER, WIDTH, Frame
from loadtest.report.charts.scale import Scale
from loadtest.report.markup import Html, coordinate, element

DASHES = (None, "7 3", "2 3", "10 3 2 3")
"""So that lines differ without their colours."""

_LABEL_HEIGHT = 13.0
_BOX = 0.85
"""About what of a chart's width the box has, before the box is known."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A value that a reader compares with: a percentile, a promise, a limit."""

    value: float
    label: str
    promised: bool = False


def line(
    frame: Frame, points: Iterable[tuple[float, float]], colour: str, dash: str | None = None
) -> Html:
    """A line through the points in order, interrupted where a y is NaN. A point without neighbours
    is a dot."""
    stretches = _stretches((frame.x_at(x), frame.y_at(y) if y == y else y) for x, y in points)
    path = "".join(
        "M" + "L".join(map(_place, stretch)) + ("h0.01" if len(stretch) == 1 else "")
        for stretch in stretches
    )
    return element("path", d=path, class_=f"line {colour}", stroke_dasharray=dash)


def band(frame: Frame, points: Sequence[tuple[float, float, float]], colour: str) -> Html:
    """The room between a low and a high y at each x, interrupted where either is NaN."""
    highs = {x: high for x, _, high in points}
    path = ""
    for stretch in _stretches((x, low if high == high else high) for x, low, high in points):
        there = [(frame.x_at(x), frame.y_at(highs[x])) for x, _ in stretch]
        back = [(frame.x_at(x), frame.y_at(low)) for x, low in reversed(stretch)]
        path += "M" + "L".join(map(_place, there + back)) + "Z"
    return element("path", d=path, class_=f"band {colour}")


def dots(
    frame: Frame, points: Iterable[tuple[float, float]], colour: str, radius: float = 1.6
) -> Html:
    """One path for all, so that many take little room: round caps of lines without length."""
    path = "".join(f"M{_place((frame.x_at(x), frame.y_at(y)))}h0" for x, y in points)
    return element("path", d=path, class_=f"dots {colour}", stroke_width=2 * radius)


def end_labels(frame: Frame, ends: Sequence[tuple[str, float, str]]) -> list[Html]:
    """Names (label, y, colour) right of the box at the lines' last values, moved apart where they
    would cover each other."""
    wanted = sorted((frame.y_at(y), label, colour) for label, y, colour in ends)
    lowest = frame.bottom_at - _LABEL_HEIGHT * (len(wanted) - 1)
    words, free_from = [], -math.inf
    for place, label, colour in wanted:
        at = max(min(place, lowest), free_from)
        free_from, lowest = at + _LABEL_HEIGHT, lowest + _LABEL_HEIGHT
        words.append(
            element("text", label, x=frame.right_at + 6, y=at + 4, class_=f"name {colour}")
        )
    return words


def room_for(labels: Iterable[str]) -> float:
    """How many units beside the box these names need."""
    return 10 + LETTER * max(map(len, labels), default=0)


def rows_for(references: Sequence[Reference], scale: Scale) -> list[int]:
    """In which row above the box each reference's name stands, at the left of its line, so that it
    covers no other name and no other's line. The references go from low to high."""
    rows: list[int] = []
    ends = [scale.at(each.value) * WIDTH * _BOX for each in references]
    for number, (reference, end) in enumerate(zip(references, ends, strict=True)):
        start = end - LETTER * len(reference.label) - 8
        rows.append(max((rows[n] + 1 for n in range(number) if ends[n] > start), default=0))
    return rows


def verticals(frame: Frame, references: Sequence[Reference], rows: Sequence[int]) -> list[Html]:
    """Lines from the floor to above the box, each with its name in its row."""
    drawn = []
    for reference, row in zip(references, rows, strict=True):
        at, baseline = frame.x_at(reference.value), frame.row_at(row)
        width = LETTER * len(reference.label) + 4
        kind = "promise" if reference.promised else "percentile"
        # Left of its line where that leaves it on the page, else over the line's end.
        top = baseline - 9 if at > width else baseline + 3
        drawn += [
            element("path", d=f"M{at:.1f} {frame.bottom_at:.1f}V{top:.1f}", class_=kind),
            element(
                "text",
                reference.label,
                x=at - 4 if at > width else 0,
                y=baseline,
                text_anchor="end" if at > width else "start",
                class_=f"{kind}-name",
            ),
        ]
    return drawn


def horizontals(frame: Frame, references: Iterable[Reference]) -> list[Html]:
    """Dashed lines from left to right, each named on it at the left."""
    drawn = []
    for reference in references:
        at = frame.y_at(reference.value)
        drawn += [
            element(
                "path", d=f"M{frame.left_at:.1f} {at:.1f}H{frame.right_at:.1f}", class_="promise"
            ),
            element(
                "text",
                reference.label,
                x=frame.left_at + 4,
                y=at - 4 if at > frame.top_at + 14 else at + 13,
                class_="promise-name",
            ),
        ]
    return drawn


def tips(frame: Frame, told: Sequence[tuple[float, str]]) -> Html:
    """A strip around each x, from one middle to the next, that tells its text when it is pointed
    at."""
    strips = []
    places = [frame.x_at(x) for x, _ in told]
    for at, (place, (_, text)) in enumerate(zip(places, told, strict=True)):
        left = (places[at - 1] + place) / 2 if at else frame.left_at
        right = (place + places[at + 1]) / 2 if at + 1 < len(places) else frame.right_at
        strips.append(
            element(
                "rect",
                x=left,
                y=frame.top_at,
                width=max(0.0, right - left),
                height=frame.bottom_at - frame.top_at,
                data_tip=text,
            )
        )
    return element("g", *strips, class_="tips")


def _place(place: tuple[float, float]) -> str:
    return f"{coordinate(round(place[0], 1))} {coordinate(round(place[1], 1))}"


def _stretches(points: Iterable[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Runs of points without a NaN between them."""
    found: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point[1] == point[1]:
            found[-1].append(point)
        elif found[-1]:
            found.append([])
    return [stretch for stretch in found if stretch]
