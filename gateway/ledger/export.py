"""Rows of the ledger as a file: CSV for people and spreadsheets, JSON lines for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gateway.ledger.pages import COLUMNS
from gateway.sse import json_line
from policies.pricing import usd_text

NAMES = (*COLUMNS, "cost_usd")
"""Of columns and members: those of the table, and the cost as an exact decimal number."""

_COST = COLUMNS.index("cost_nusd")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""A cell that begins so is a program to spreadsheets. Clients can choose parts of some."""


def csv_head() -> bytes:
    """The first line of a CSV file (RFC 4180)."""
    return _csv([NAMES])


def csv_rows(rows: Iterable[Sequence[Any]]) -> bytes:
    """Lines of rows with the values of COLUMNS. What is not known is empty, truth is `true` and
    `false`, and an apostrophe is before texts that a spreadsheet would run."""
    return _csv([_cell(value) for value in (*row, usd_text(row[_COST]))] for row in rows)


def json_rows(rows: Iterable[Sequence[Any]]) -> bytes:
    """The same as one JSON object a line."""
    return b"".join(
        json_line(dict(zip(NAMES, (*row, usd_text(row[_COST])), strict=True))) + b"\n"
        for row in rows
    )


FORMATS: dict[str, tuple[bytes, Callable[[], bytes], Callable[[Iterable[Sequence[Any]]], bytes]]]
FORMATS = {
    "csv": (b"text/csv; charset=utf-8; header=present", csv_head, csv_rows),
    "jsonl": (b"application/jsonl", bytes, json_rows),
}
"""By name: the content's type, what it begins with, and rows as its lines."""


def _csv(rows: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:.9g}" if abs(value) < 1e8 else f"{value:.6f}"
        case str() if value.startswith(_FORMULA):
            return "'" + value
        case _:
            return value
