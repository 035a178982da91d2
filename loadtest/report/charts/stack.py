"""Parts of a whole over time, one upon the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.report.charts.frame import Axis, Frame, Key, drawing, figure
from loadtest.report.charts.marks import tips
from loadtest.report.markup import Html, element


@dataclass(frozen=True, slots=True)
class Layer:
    """One part: its value in each of the steps; NaN in a step of which nothing is known."""

    label: str
    values: Sequence[float]
    colour: str


@dataclass(frozen=True, slots=True)
class StackChart:
    """`edges` are the steps' bounds, one more than steps. The first layer lies at the bottom. A
    step in which any layer is NaN is left empty."""

    title: str
    subtitle: str
    description: str
    x: Axis
    y: Axis
    edges: Sequence[float]
    layers: Sequence[Layer]
    told: Sequence[tuple[float, str]] = ()

    def html(self) -> Html:
        """The chart as a figure of the page."""
        frame = Frame(self.x, self.y)
        below = [0.0] * (len(self.edges) - 1)
        unknown = [any(v != v for v in step) for step in zip(*self._values(), strict=True)]
        drawn = []
        for layer in self.layers:
            path = ""
            for at, value in enumerate(layer.values):
                if unknown[at] or value <= 0:
                    continue
                left, right = frame.x_at(self.edges[at]), frame.x_at(self.edges[at + 1])
                low, high = frame.y_at(below[at]), frame.y_at(below[at] + value)
                path += f"M{left:.1f} {low:.1f}V{high:.1f}H{right:.1f}V{low:.1f}Z"
                below[at] += value
            drawn.append(element("path", d=path, class_=f"area {layer.colour}"))
        image = drawing(
            frame,
            [*drawn, tips(frame, self.told)],
            title=self.title,
            description=self.description,
        )
        legend = [Key(layer.label, layer.colour, filled=True) for layer in self.layers]
        return figure(self.title, self.subtitle, image, legend)

    def _values(self) -> list[Sequence[float]]:
        return [layer.values for layer in self.layers]
