"""How often which value occurred, and the share of values up to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.report.charts.frame import Axis, Frame, drawing, figure
from loadtest.report.charts.marks import Reference, rows_for, verticals
from loadtest.report.charts.scale import Log, fitting, from_zero
from loadtest.report.markup import Html, element
from loadtest.report.quantities import counted, percent, tick_percent

Floats = NDArray[np.float64]

_FEWEST_BINS = 8
_MOST_BINS = 40
_STEPS_OF_SHARE = 160


@dataclass(frozen=True, slots=True)
class Histogram:
    """Of values that are not NaN, at least one, written as by `label`, and as by `tick` beside the
    axis. `upright` are marked values. Logarithmic where the
    values spread widely; then all bars are equal ratios wide."""

    title: str
    subtitle: str
    description: str
    values: Floats
    label: Callable[[float], str]
    tick: Callable[[float], str]
    colour: str
    upright: Sequence[Reference] = ()

    def html(self) -> Html:
        """The chart as a figure of the page."""
        upright = sorted(self.upright, key=lambda each: each.value)
        marked = [each.value for each in upright]
        ends = [float(self.values.min()), float(self.values.max())]
        x = Axis(fitting([*ends, *marked]), self.tick)
        edges = _edges(x, len(self.values))
        counts, _ = np.histogram(np.clip(self.values, edges[0], edges[-1]), edges)
        shares = counts / len(self.values)
        y = Axis(from_zero(shares), tick_percent, "share of answers")
        rows = rows_for(upright, x.scale)
        frame = Frame(x, y, rows=max(rows, default=-1) + 1)
        bars = [
            element(
                "rect",
                x=frame.x_at(start),
                y=frame.y_at(share),
                width=max(0.5, frame.x_at(end) - frame.x_at(start) - 0.7),
                height=frame.bottom_at - frame.y_at(share),
                data_tip=f"{self.label(start)} to {self.label(end)}: "
                f"{counted(int(count), 'answer')}, {percent(share)}",
            )
            for start, end, share, count in zip(
                edges.tolist(), edges[1:].tolist(), shares.tolist(), counts.tolist(), strict=False
            )
            if count
        ]
        layers = [element("g", *bars, class_=f"bars {self.colour}")]
        layers += verticals(frame, upright, rows)
        image = drawing(frame, layers, title=self.title, description=self.description)
        return figure(self.title, self.subtitle, image)


def shares_up_to(values: Floats) -> list[tuple[float, float]]:
    """The empirical distribution as a line: points (value, share of values up to it), few enough
    to draw and densest at the upper end, where promises are broken."""
    ordered = np.sort(values)
    if len(ordered) <= _STEPS_OF_SHARE:
        places = np.arange(len(ordered))
    else:
        even = np.linspace(0, len(ordered) - 1, _STEPS_OF_SHARE * 3 // 4)
        tail = np.linspace(0.95 * (len(ordered) - 1), len(ordered) - 1, _STEPS_OF_SHARE // 4)
        places = np.unique(np.concatenate((even, tail)).astype(np.int64))
    shares = (places + 1) / len(ordered)
    return [(float(ordered[0]), 0.0), *zip(ordered[places].tolist(), shares.tolist(), strict=True)]


def _edges(x: Axis, count: int) -> Floats:
    bins = max(_FEWEST_BINS, min(_MOST_BINS, int(2 * count**0.5)))
    low, high = x.scale.low, x.scale.high
    if isinstance(x.scale, Log):
        return np.geomspace(low, high, bins + 1)
    return np.linspace(low, high, bins + 1)
