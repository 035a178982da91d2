"""Traces of the Azure LLM inference service: CSV with a header.

`TIMESTAMP` is a moment in time (`2023-11-16 18:17:03.9799600`; newer files say the time zone too,
and UTC is meant where none is said), `ContextTokens` and `GeneratedTokens` are lengths. Nothing is
known of what prompts share.
"""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from pathlib import Path

from cache.hashing import CHAIN_BLOCK_TOKENS
from loadtest.trace import Trace, TraceRequest
from loadtest.traces.lines import Place, TraceError, lines_of

_TIME, _PROMPT, _OUTPUT = "TIMESTAMP", "ContextTokens", "GeneratedTokens"
COLUMNS = (_TIME, _PROMPT, _OUTPUT)
_MOST_DIGITS = 12


def read_azure(path: Path) -> Trace:
    """The requests as they stand in the file, at seconds since 1970; raises TraceError."""
    lines = lines_of(path)
    header = next(lines, None)
    if header is None:
        raise TraceError(f"{path}: is empty")
    columns = columns_of(header[1])
    for name in COLUMNS:
        if name not in columns:
            raise header[0].wrong(f"{name}: no such column")
    return Trace(
        path.name, CHAIN_BLOCK_TOKENS, [_request(place, columns, line) for place, line in lines]
    )


def columns_of(header: str) -> list[str]:
    """The names of a header's columns; none of what is no line of CSV."""
    try:
        return [name.strip() for name in _cells(header)]
    except csv.Error:
        return []


def _cells(line: str) -> list[str]:
    return next(csv.reader([line]))


def _request(place: Place, columns: list[str], line: str) -> TraceRequest:
    try:
        cells = _cells(line)
    except csv.Error as error:
        raise place.wrong(f"is no line of CSV ({error})") from None
    if len(cells) != len(columns):
        raise place.wrong(f"{len(cells)} cells under {len(columns)} columns")
    row = dict(zip(columns, cells, strict=True))
    return TraceRequest(
        at_s=_seconds(place, row[_TIME]),
        prompt_tokens=_count(place, _PROMPT, row[_PROMPT], 1),
        output_tokens=_count(place, _OUTPUT, row[_OUTPUT], 0),
    )


def _seconds(place: Place, text: str) -> float:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise place.wrong(f"{_TIME}: must be like 2023-11-16 18:17:03.9799600") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _count(place: Place, name: str, text: str, least: int) -> int:
    digits = text.strip()
    # `isdecimal` and `isascii`: int() takes signs, underscores and other scripts' digits too
    plain = digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS
    if not plain or int(digits) < least:
        raise place.wrong(f"{name}: must be a whole number of at least {least}")
    return int(digits)
