"""Lines of a trace's file. What is wrong with one is told by file, line and field."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import orjson


class TraceError(ValueError):
    """A file that cannot be read as a trace. The message names it, and line and field if one of
    them is at fault; never what a prompt says."""


class Place(NamedTuple):
    """A line of a file, counted from 1."""

    path: Path
    line: int

    def wrong(self, message: str) -> TraceError:
        """The error to raise about this line."""
        return TraceError(f"{self.path}:{self.line}: {message}")


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one line. Its readers raise TraceError for what is missing or wrong."""

    place: Place
    values: Mapping[str, object]

    def number(self, name: str) -> float:
        """A number; JSON has no infinite ones."""
        value = self._required(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.place.wrong(f"{name}: must be a number")
        return float(value)

    def count(self, name: str, least: int) -> int:
        """A whole number of at least `least`."""
        value = self._required(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.place.wrong(f"{name}: must be a whole number of at least {least}")
        return value

    def array(self, name: str) -> list[object]:
        """A JSON array."""
        value = self._required(name)
        if not isinstance(value, list):
            raise self.place.wrong(f"{name}: must be an array")
        return value

    def ids(self, name: str) -> list[int | str]:
        """An array of whole numbers or texts."""
        ids: list[int | str] = []
        for value in self.array(name):
            if isinstance(value, bool) or not isinstance(value, int | str):
                raise self.place.wrong(f"{name}: must hold whole numbers or texts only")
            ids.append(value)
        return ids

    def text(self, name: str) -> str:
        """A text that is not empty."""
        value = self._required(name)
        if not isinstance(value, str) or not value:
            raise self.place.wrong(f"{name}: must be text")
        return value

    def _required(self, name: str) -> object:
        try:
            return self.values[name]
        except KeyError:
            raise self.place.wrong(f"{name}: is missing") from None


def lines_of(path: Path) -> Iterator[tuple[Place, str]]:
    """Every line that is not blank; a file whose name ends in `.gz` is unpacked. Raises TraceError
    if there is no such file, or it is no text."""
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline=None) as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield Place(path, number), line
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise TraceError(
            f"{path}: is no text after line {number} ({type(error).__name__})"
        ) from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from None


def objects_of(path: Path) -> Iterator[Fields]:
    """The JSON object of every line."""
    for place, line in lines_of(path):
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise place.wrong("is not JSON") from None
        if not isinstance(value, dict):
            raise place.wrong("must be a JSON object")
        yield Fields(place, value)
