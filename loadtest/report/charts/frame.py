"""What every chart stands in: a box with two quiet axes, a title and words for those who listen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.report.charts.scale import Scale
from loadtest.report.markup import Html, element, joined

WIDTH = 420.0
HEIGHT = 236.0
MARGIN = 16.0
"""Right of a box that has no names beside it."""
LETTER = 7.2
"""A letter's width on a phone, where text is largest against the chart."""

_BOTTOM = 28.0
_TOP = 12.0
_Y_TITLE = 16.0
_ROW = 14.0


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale and how its ticks are written. `title` is what the values are, for the y axis only:
    the chart's subtitle says what x is."""

    scale: Scale
    label: Callable[[float], str]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """Where things are within a chart, in its own units (about pixels). `rows` lines of text have
    room above the box, `right` units beside it."""

    x: Axis
    y: Axis
    rows: int = 0
    right: float = MARGIN
    height: float = HEIGHT

    @property
    def left_at(self) -> float:
        widest = max((len(self.y.label(tick)) for tick in self.y.scale.ticks), default=0)
        return 8 + LETTER * widest

    @property
    def right_at(self) -> float:
        return WIDTH - self.right

    @property
    def top_at(self) -> float:
        return (
            _TOP
            + (_Y_TITLE if self.y.title else 0.0)
            + (_ROW * self.rows + 3 if self.rows else 0.0)
        )

    @property
    def bottom_at(self) -> float:
        return self.height - _BOTTOM

    def x_at(self, value: float) -> float:
        return self.left_at + self.x.scale.at(value) * (self.right_at - self.left_at)

    def y_at(self, value: float) -> float:
        return self.bottom_at - self.y.scale.at(value) * (self.bottom_at - self.top_at)

    def row_at(self, row: int) -> float:
        """The baseline of a line of text above the box; row 0 is next to it."""
        return self.top_at - 8 - _ROW * row


@dataclass(frozen=True, slots=True)
class Key:
    """A line of a legend: what a colour (a class of page.css) and a dash stand for."""

    label: str
    colour: str
    dash: str | None = None
    filled: bool = False


def drawing(frame: Frame, layers: Sequence[str], *, title: str, description: str) -> Html:
    """The SVG: the grid, the layers over it, the axes' words."""
    return svg(
        element("g", *_grid(frame), class_="grid"),
        *layers,
        element("g", *_words(frame), class_="axis"),
        title=title,
        description=description,
        height=frame.height,
    )


def svg(*children: str, title: str, description: str, height: float) -> Html:
    """An image of the charts' width that scales with the page and says what it shows."""
    return element(
        "svg",
        element("title", title),
        element("desc", description),
        *children,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label=f"{title}. {description}",
    )


def figure(title: str, subtitle: str, image: Html, legend: Sequence[Key] = ()) -> Html:
    """A chart with its heading and, if there are, what its colours mean."""
    return element(
        "figure",
        element("figcaption", element("strong", title), element("span", subtitle)),
        image,
        *([element("ul", *map(_legend_line, legend), class_="legend")] if legend else []),
    )


def no_chart(title: str, why: str) -> Html:
    """In the place of a chart whose values nobody knows."""
    return element(
        "figure",
        element("figcaption", element("strong", title)),
        element("p", why, class_="nothing"),
        class_="empty",
    )


def _legend_line(key: Key) -> Html:
    mark = (
        element("rect", x=0, y=0, width=14, height=10, rx=2, class_="area")
        if key.filled
        else element("path", d="M0 5H18", class_="line", stroke_dasharray=key.dash)
    )
    swatch = element(
        "svg", mark, class_=key.colour, viewBox="0 0 18 10", width=18, height=10, aria_hidden="true"
    )
    return element("li", swatch, key.label)


def _grid(frame: Frame) -> list[Html]:
    lines = "".join(
        f"M{frame.left_at:.1f} {frame.y_at(tick):.1f}H{frame.right_at:.1f}"
        for tick in frame.y.scale.ticks
    )
    floor = f"M{frame.left_at:.1f} {frame.bottom_at:.1f}H{frame.right_at:.1f}"
    ticks = "".join(
        f"M{frame.x_at(tick):.1f} {frame.bottom_at:.1f}v4" for tick in frame.x.scale.ticks
    )
    return [element("path", d=lines), element("path", d=floor + ticks, class_="base")]


def _words(frame: Frame) -> list[Html]:
    words = [
        element("text", frame.y.label(tick), x=frame.left_at - 6, y=frame.y_at(tick) + 4)
        for tick in frame.y.scale.ticks
    ]
    free_from = 0.0
    for tick in frame.x.scale.ticks:
        label = frame.x.label(tick)
        place, half = frame.x_at(tick), len(label) * LETTER / 2
        if place - half < free_from:
            continue  # It would run into the label before it; its tick stays.
        free_from = place + half + 6
        words.append(element("text", label, x=place, y=frame.bottom_at + 18, text_anchor="middle"))
    if frame.y.title:
        words.append(element("text", frame.y.title, x=0, y=10, text_anchor="start"))
    return [joined(words)]
