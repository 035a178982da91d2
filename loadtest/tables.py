"""Tables for a terminal and for a document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_NOTHING = 1e-6
"""What is smaller comes of rounding."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headers. The first column is text and stands left, the others right."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.headers):
                raise ValueError(f"a row of {len(row)} cells under {len(self.headers)} headers")

    def text(self) -> str:
        """Aligned with spaces, a rule under the headers."""
        widths = self._widths()
        rule = "  ".join("-" * width for width in widths)
        return "\n".join(
            [_aligned(self.headers, widths), rule, *(_aligned(row, widths) for row in self.rows)]
        )

    def markdown(self) -> str:
        """A GitHub-flavoured Markdown table."""
        lines = [self.headers, ("---", *("---:" for _ in self.headers[1:])), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def _widths(self) -> list[int]:
        return [max(map(len, column)) for column in zip(self.headers, *self.rows, strict=True)]


def number(value: float | None) -> str:
    """About three significant digits, and all digits before the point; an en dash for None. What
    is not nothing does not look like it, down to a millionth."""
    if value is None:
        return "–"
    magnitude = abs(value)
    decimals = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2
    if _NOTHING <= magnitude < 0.1:
        decimals = 1 - math.floor(math.log10(magnitude))
    return f"{value:,.{decimals}f}"


def percent(share: float | None) -> str:
    """A share of 0 to 1 with one decimal; an en dash for None. What is not quite all or nothing
    does not look like it."""
    if share is None:
        return "–"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    return "< 0.1 %" if 0 < share < 0.0005 else f"{share * 100:.1f} %"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    line = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
    return "  ".join(line).rstrip()
