"""Shares with their intervals, one bar for each name, beside what was promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.report.charts.frame import LETTER, WIDTH, figure, svg
from loadtest.report.markup import Html, element
from loadtest.report.quantities import percent, percent_range, target, tick_percent

_ROW = 40.0
_TOP = 8.0
_BOTTOM = 24.0
_BAR = 12.0


@dataclass(frozen=True, slots=True)
class ShareBar:
    """One name's share of 0 to 1 with its interval, and the least that was promised."""

    label: str
    share: float
    low: float
    high: float
    target: float

    @property
    def word(self) -> str:
        """What it comes to, certain or not."""
        if self.share >= self.target:
            return "kept" if self.low >= self.target else "kept, narrowly"
        return "missed" if self.high < self.target else "missed, narrowly"


def share_bars(title: str, subtitle: str, description: str, bars: Sequence[ShareBar]) -> Html:
    """Bars from 0 to 100 %, each under its name; a whisker is the interval, an upright stroke the
    target."""
    height = _TOP + _ROW * len(bars) + _BOTTOM
    rows = [part for at, bar in enumerate(bars) for part in _row(bar, _TOP + _ROW * at)]
    axis = [
        element("text", tick_percent(share), x=_x(share), y=height - 6, text_anchor=anchor)
        for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end"))
    ]
    grid = element(
        "path",
        d="".join(f"M{_x(each):.1f} {_TOP:.1f}V{height - _BOTTOM:.1f}" for each in (0, 0.5, 1)),
    )
    image = svg(
        element("g", grid, class_="grid"),
        *rows,
        element("g", *axis, class_="axis"),
        title=title,
        description=description,
        height=height,
    )
    return figure(title, subtitle, image)


def _row(bar: ShareBar, top: float) -> list[Html]:
    middle = top + 20 + _BAR / 2
    kept = bar.share >= bar.target
    words = f"{percent(bar.share)} {'✓' if kept else '✗'} {bar.word}"
    room = int((WIDTH - LETTER * len(words)) / LETTER) - 1
    name = bar.label if len(bar.label) <= room else bar.label[: room - 1] + "…"
    tip = (
        f"{bar.label}: {percent(bar.share)}, 95 % interval {percent_range(bar.low, bar.high)}, "
        f"target {target(bar.target)}"
    )
    goal = _x(bar.target)
    return [
        element("text", name, x=0, y=top + 14, class_="row-name"),
        element("text", words, x=WIDTH, y=top + 14, text_anchor="end", class_="row-value"),
        element(
            "rect",
            x=0,
            y=middle - _BAR / 2,
            width=max(1.0, _x(bar.share)),
            height=_BAR,
            rx=2,
            class_=f"area {'c-good' if kept else 'c-bad'}",
            data_tip=tip,
        ),
        element(
            "path",
            d=f"M{_x(bar.low):.1f} {middle:.1f}H{_x(bar.high):.1f}"
            f"M{_x(bar.low):.1f} {middle - 3:.1f}v6M{_x(bar.high):.1f} {middle - 3:.1f}v6",
            class_="whisker",
        ),
        element("path", d=f"M{goal:.1f} {middle - _BAR / 2 - 3:.1f}v{_BAR + 6:.1f}", class_="goal"),
    ]


def _x(share: float) -> float:
    return share * (WIDTH - 1)
