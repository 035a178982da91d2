"""Tables for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    """Three significant digits, and all digits before the point; an en dash for None."""
    if value is None:
        return "–"
    magnitude = abs(value)
    decimals = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2
    return f"{value:,.{decimals}f}"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    line = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
    return "  ".join(line).rstrip()
