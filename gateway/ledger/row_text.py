"""A row as one line of JSON, and with values that either database takes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from operator import attrgetter

import msgspec
from sqlalchemy import Float, Integer, String

from gateway.database.schema import requests
from gateway.ledger.row import LedgerRow

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LedgerRow)

_MOST_INTEGER = (1 << 63) - 1
_MOST_CHARACTERS = {
    column.name: column.type.length or 0
    for column in requests.columns
    if isinstance(column.type, String)
}
_INTEGERS = tuple(
    column.name
    for column in requests.columns
    if isinstance(column.type, Integer) and not column.nullable
)
_FLOATS = tuple(
    column.name
    for column in requests.columns
    if isinstance(column.type, Float) and not column.nullable
)
_texts_of = attrgetter(*_MOST_CHARACTERS)
_integers_of = attrgetter(*_INTEGERS)
_floats_of = attrgetter(*_FLOATS)
_mosts = tuple(_MOST_CHARACTERS.values())


def to_lines(rows: Iterable[LedgerRow]) -> bytes:
    """Each row, made `storable`, as a JSON object and a line's end."""
    return b"".join(_encoder.encode(storable(row)) + b"\n" for row in rows)


def from_line(line: bytes) -> LedgerRow | None:
    """The row of a line; None for one that is damaged. Fields that other versions have are left
    out."""
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def storable(row: LedgerRow) -> LedgerRow:
    """The row with every value as its column takes it: PostgreSQL knows no NUL in a text and no
    half of a character, and refuses what is too long. Nearly always that is the row itself."""
    texts = _texts_of(row)
    if (
        "".join(texts).isprintable()
        and all(map(int.__ge__, _mosts, map(len, texts)))
        and max(_integers_of(row)) <= _MOST_INTEGER
        and math.isfinite(sum(_floats_of(row)))
    ):
        return row
    values = asdict(row)
    for name, most in _MOST_CHARACTERS.items():
        text = values[name].encode("utf-8", "replace").decode().replace("\0", "")
        values[name] = text[:most]
    for name in _INTEGERS:
        values[name] = min(values[name], _MOST_INTEGER)
    for name in _FLOATS:
        values[name] = values[name] if math.isfinite(values[name]) else 0.0
    return LedgerRow(**values)
