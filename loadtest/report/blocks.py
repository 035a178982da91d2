"""What sections are made of: headings, tables in boxes of their own, tiles, lists of terms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from loadtest.report.markup import Html, element
from loadtest.tables import Table

_MOST_ROWS = 100


class Tile(NamedTuple):
    """A figure in large type, its name over it, and what there is to say below it."""

    name: str
    figure: str
    remark: str = ""


def section(title: str, *children: str, key: str | None = None, intro: str | None = None) -> Html:
    """A part of the page with its heading; a line below it says what one looks at."""
    return element(
        "section",
        element("h2", title),
        *([element("p", intro, class_="intro")] if intro else []),
        *children,
        id=key,
    )


def group(title: str, *children: str, intro: str | None = None) -> Html:
    """A part of a section."""
    return element(
        "div",
        element("h3", title),
        *([element("p", intro, class_="intro")] if intro else []),
        *children,
        class_="group",
    )


def charts(*figures: str) -> Html:
    """Charts side by side where there is room, below each other on a phone."""
    return element("div", *figures, class_="charts")


def tiles(each: Iterable[Tile]) -> Html:
    """Tiles in rows."""
    return element(
        "dl",
        *(
            element(
                "div",
                element("dt", tile.name),
                element("dd", tile.figure, class_="figure"),
                *([element("dd", tile.remark)] if tile.remark else []),
            )
            for tile in each
        ),
        class_="tiles",
    )


def table(found: Table, caption: str, links: Sequence[str | None] = ()) -> Html:
    """A table that scrolls within its own box; the first column is the rows' headings. `links` are
    the places on this page that they lead to, None for none. Beyond 100 rows it says how many more
    there are."""
    targets = [*links, *[None] * (len(found.rows) - len(links))]
    rows = [
        element("tr", _row_heading(row[0], link), *(element("td", cell) for cell in row[1:]))
        for row, link in zip(found.rows[:_MOST_ROWS], targets, strict=False)
    ]
    more = len(found.rows) - _MOST_ROWS
    return element(
        "div",
        element(
            "table",
            element(
                "caption", caption + (f" ({more:,} more rows are left out)" if more > 0 else "")
            ),
            element("thead", element("tr", *(_heading(each) for each in found.headers))),
            element("tbody", *rows),
        ),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=caption,
    )


def terms(pairs: Iterable[tuple[str, str]]) -> Html:
    """Names and what they are."""
    return element(
        "dl",
        *(element("div", element("dt", name), element("dd", words)) for name, words in pairs),
        class_="terms",
    )


def lines(each: Iterable[str]) -> Html:
    """A list of sentences."""
    return element("ul", *(element("li", line) for line in each))


def _heading(name: str) -> Html:
    return element("th", name, scope="col")


def _row_heading(name: str, link: str | None) -> Html:
    return element("th", name if link is None else element("a", name, href=f"#{link}"), scope="row")
