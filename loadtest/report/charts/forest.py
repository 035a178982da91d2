"""Ratios with their intervals, one below the other, beside the line of no difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.report.charts.frame import LETTER, WIDTH, figure, svg
from loadtest.report.charts.scale import Log, log
from loadtest.report.markup import Html, element

_ROW = 36.0
_TOP = 8.0
_BOTTOM = 24.0
_LEAST_SPAN = 1.25
_MOST_SPAN = 100.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """A value above 0 and its interval, if it has one. `word` says what it comes to, `colour` is a
    class of page.css."""

    label: str
    value: float
    low: float | None
    high: float | None
    word: str
    colour: str


def forest(title: str, subtitle: str, description: str, ratios: Sequence[Ratio]) -> Html:
    """On a logarithmic axis with 1× in its middle. What lies beyond 100× either way is drawn at the
    edge."""
    scale = _scale(ratios)
    height = _TOP + _ROW * len(ratios) + _BOTTOM
    floor = height - _BOTTOM
    grid = "".join(f"M{_x(scale, tick):.1f} {_TOP:.1f}V{floor:.1f}" for tick in scale.ticks)
    axis = [
        element("text", f"{tick:g}×", x=_x(scale, tick), y=height - 6, text_anchor="middle")
        for tick in scale.ticks
    ]
    image = svg(
        element("g", element("path", d=grid), class_="grid"),
        element("path", d=f"M{_x(scale, 1):.1f} {_TOP:.1f}V{floor:.1f}", class_="goal"),
        *(part for at, each in enumerate(ratios) for part in _row(each, scale, _TOP + _ROW * at)),
        element("g", *axis, class_="axis"),
        title=title,
        description=description,
        height=height,
    )
    return figure(title, subtitle, image)


def _row(each: Ratio, scale: Log, top: float) -> list[Html]:
    middle = top + 25
    low, high = each.low or each.value, each.high or each.value
    words = f"{each.value:.3g}× {each.word}"
    room = int((WIDTH - LETTER * len(words)) / LETTER) - 1
    name = each.label if len(each.label) <= room else each.label[: room - 1] + "…"
    return [
        element("text", name, x=0, y=top + 13, class_="row-name"),
        element("text", words, x=WIDTH, y=top + 13, text_anchor="end", class_="row-value"),
        element(
            "path",
            d=f"M{_x(scale, low):.1f} {middle:.1f}H{_x(scale, high):.1f}",
            class_=f"interval {each.colour}",
        ),
        element("circle", cx=_x(scale, each.value), cy=middle, r=4.5, class_=f"area {each.colour}"),
    ]


def _scale(ratios: Sequence[Ratio]) -> Log:
    """Without the plot's end in a number: as far below 1 as above it."""
    ends = [bound for each in ratios for bound in (each.value, each.low, each.high) if bound]
    span = max([_LEAST_SPAN, *(max(end, 1 / end) for end in ends)])
    span = min(span, _MOST_SPAN) * 1.05
    around = log(1 / span, span)
    if len(around.ticks) >= 3:
        return around
    step = 1 + (span - 1) / 2
    nice = next((n for n in (1.1, 1.2, 1.5, 2.0) if n <= span and n >= step * 0.8), 1.1)
    return Log(1 / span, span, (round(1 / nice, 2), 1.0, nice))


def _x(scale: Log, value: float) -> float:
    return 8 + scale.at(value) * (WIDTH - 16)
