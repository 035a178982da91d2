"""Lines over time, over a rate or over a latency: one to a few series on common axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.report.charts.frame import MARGIN, Axis, Frame, Key, drawing, figure
from loadtest.report.charts.marks import (
    Reference,
    band,
    dots,
    end_labels,
    horizontals,
    line,
    room_for,
    rows_for,
    tips,
    verticals,
)
from loadtest.report.markup import Html

_LONGEST_END_LABEL = 10
_MOST_END_LABELS = 3


@dataclass(frozen=True, slots=True)
class Series:
    """Points in the order of their x; NaN as y interrupts the line. `dotted`: each point is marked,
    as where there are few."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    dash: str | None = None
    dotted: bool = False


@dataclass(frozen=True, slots=True)
class LineChart:
    """`band` (x, low, high) is drawn below the lines. `across` are promised values of
    y, `upright` marked values of x from low to high, `told` what a pointer at an x is told."""

    title: str
    subtitle: str
    description: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    band: Sequence[tuple[float, float, float]] = ()
    across: Sequence[Reference] = ()
    upright: Sequence[Reference] = ()
    told: Sequence[tuple[float, str]] = ()

    def frame(self) -> Frame:
        """The box that it is drawn in, for those who draw below its lines."""
        right = room_for(each.label for each in self.series) if self._names_fit() else MARGIN
        return Frame(self.x, self.y, rows=max(self._rows(), default=-1) + 1, right=right)

    def html(self) -> Html:
        """The chart as a figure of the page."""
        return self.html_over()

    def html_over(self, *below: Html) -> Html:
        """The same over marks that were made for its frame."""
        frame = self.frame()
        layers = [*below]
        if self.band:
            layers.append(band(frame, self.band, self.series[0].colour))
        layers += verticals(frame, self.upright, self._rows())
        for each in self.series:
            layers.append(line(frame, each.points, each.colour, each.dash))
            if each.dotted:
                known = [point for point in each.points if point[1] == point[1]]
                layers.append(dots(frame, known, each.colour, radius=3))
        layers += horizontals(frame, self.across)
        if self._names_fit():
            layers += end_labels(frame, self._ends())
        if self.told:
            layers.append(tips(frame, self.told))
        image = drawing(frame, layers, title=self.title, description=self.description)
        return figure(self.title, self.subtitle, image, self._legend())

    def _names_fit(self) -> bool:
        names = [each.label for each in self.series]
        return len(names) <= _MOST_END_LABELS and all(
            len(name) <= _LONGEST_END_LABEL for name in names
        )

    def _ends(self) -> list[tuple[str, float, str]]:
        ends = []
        for each in self.series:
            known = [y for _, y in each.points if y == y]
            if known:
                ends.append((each.label, known[-1], each.colour))
        return ends

    def _legend(self) -> list[Key]:
        if self._names_fit():
            return []
        return [Key(each.label, each.colour, each.dash) for each in self.series]

    def _rows(self) -> list[int]:
        return rows_for(self.upright, self.x.scale)
