"""Records as columns: how a million of them are summed up, kept in memory and written to a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain, islice, pairwise
from operator import attrgetter
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from loadtest.record import Outcome, Record, Tiers

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = NDArray[np.int64]
"""Numbers of rows."""
Name = TypeVar("Name", bound="str | None")

WHOLE = ("index", "prompt_tokens", "output_tokens")
TIMES = ("due_s", "sent_s", "ended_s", "stall_s")
OPTIONAL_TIMES = ("first_s", "last_s", "publish_s")
OPTIONAL_WHOLE = ("cached_tokens", "price_nusd")
TIERS = ("device_tokens", "dram_tokens", "redis_tokens")
NAMED = ("outcome", "tenant", "label", "reason", "replica")

_ROWS_AT_ONCE = 1 << 13
_NO_TIERS = (None, None, None)


@dataclass(frozen=True, slots=True, eq=False)
class Coded(Generic[Name]):
    """A column of few names, no two of them equal, in the order of their first appearance: a row's
    name is `names[codes[row]]`."""

    codes: Ints
    names: tuple[Name, ...]

    def __getitem__(self, rows: Rows) -> Coded[Name]:
        """Only these rows; all names stay."""
        return Coded(self.codes[rows], self.names)

    def renamed(self, name: Callable[[Name], Name]) -> Coded[Name]:
        """With other names; names that become equal become one."""
        places: dict[Name, int] = {}
        moved = [places.setdefault(name(each), len(places)) for each in self.names]
        return Coded(np.array(moved, np.int64)[self.codes], tuple(places))

    def groups(self) -> dict[Name, Rows]:
        """The rows of each name that has any, in their order."""
        by_name = np.argsort(self.codes, kind="stable")
        bounds = np.searchsorted(self.codes[by_name], np.arange(len(self.names) + 1))
        return {
            name: by_name[low:high]
            for name, low, high in zip(self.names, bounds, bounds[1:], strict=False)
            if high > low
        }

    def tolist(self) -> list[Name]:
        """Every row's name."""
        return [self.names[code] for code in self.codes.tolist()]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """An array for each field of `Record`, with NaN where a record has None.

    The gaps of row r are `gaps_s[gap_starts[r] : gap_starts[r + 1]]`. Of a row, the three tiers are
    known all together or not at all. Nobody writes to the arrays.
    """

    index: Ints
    due_s: Floats
    sent_s: Floats
    ended_s: Floats
    outcome: Coded[Outcome]
    prompt_tokens: Ints
    output_tokens: Ints
    first_s: Floats
    last_s: Floats
    publish_s: Floats
    cached_tokens: Floats
    device_tokens: Floats
    dram_tokens: Floats
    redis_tokens: Floats
    tenant: Coded[str]
    label: Coded[str]
    reason: Coded[str | None]
    gaps_s: Floats
    gap_starts: Ints
    price_nusd: Floats
    replica: Coded[str]
    stall_s: Floats

    @classmethod
    def of(cls, records: Iterable[Record]) -> Columns:
        """The records, read once and a few at a time; those of columns are not even made."""
        if isinstance(records, ColumnRecords):
            return records.columns
        building, source = _Building(), iter(records)
        while chunk := list(islice(source, _ROWS_AT_ONCE)):
            building.add(chunk)
        return building.columns()

    @property
    def ok(self) -> NDArray[np.bool_]:
        """Which rows were answered whole and as asked."""
        is_ok = np.array([name is Outcome.OK for name in self.outcome.names], np.bool_)
        return is_ok[self.outcome.codes]

    @property
    def ttft_s(self) -> Floats:
        """`Record.ttft_s` of each row."""
        return self.first_s - self.sent_s

    @property
    def time_to_publish_s(self) -> Floats:
        """`Record.time_to_publish_s` of each row."""
        return self.publish_s - self.sent_s

    @property
    def tpot_s(self) -> Floats:
        """`Record.tpot_s` of each row."""
        intervals = np.where(self.output_tokens >= 2, self.output_tokens - 1.0, np.nan)
        return (self.last_s - self.first_s) / intervals

    @property
    def e2e_s(self) -> Floats:
        """`Record.e2e_s` of each row."""
        return self.ended_s - self.sent_s

    @property
    def gap_counts(self) -> Ints:
        """How many gaps each row has."""
        return np.diff(self.gap_starts)

    def take(self, rows: Rows) -> Columns:
        """These rows, in this order."""
        counts = self.gap_counts[rows]
        starts = starts_of(counts)
        # A gap keeps its distance from the first one of its row, which lay elsewhere before.
        moved = np.repeat(self.gap_starts[rows] - starts[:-1], counts)
        taken: dict[str, Any] = {name: getattr(self, name)[rows] for name in _BY_ROW}
        return Columns(
            **taken, gaps_s=self.gaps_s[np.arange(starts[-1]) + moved], gap_starts=starts
        )

    def __len__(self) -> int:
        return int(self.index.size)

    def records(self) -> list[Record]:
        """All of them, made now."""
        values: dict[str, list[Any]] = {
            name: getattr(self, name).tolist() for name in (*WHOLE, *TIMES, *NAMED)
        }
        for name in OPTIONAL_TIMES:
            values[name] = or_none(getattr(self, name))
        for name in (*OPTIONAL_WHOLE, *TIERS):
            values[name] = whole_or_none(getattr(self, name))
        values["tiers"] = [
            None if device is None else Tiers(device, dram, redis)
            for device, dram, redis in zip(*(values[name] for name in TIERS), strict=True)
        ]
        gaps, starts = self.gaps_s.tolist(), self.gap_starts.tolist()
        values["gaps_s"] = [tuple(gaps[low:high]) for low, high in pairwise(starts)]
        by_field = [values[field.name] for field in fields(Record)]
        return [Record(*row) for row in zip(*by_field, strict=True)]


class ColumnRecords(Sequence[Record]):
    """Columns as a sequence of records, which are made whenever they are asked for."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, at: int) -> Record: ...
    @overload
    def __getitem__(self, at: slice) -> ColumnRecords: ...
    def __getitem__(self, at: int | slice) -> Record | ColumnRecords:
        rows = np.arange(len(self))
        if isinstance(at, slice):
            return ColumnRecords(self.columns.take(rows[at]))
        return self.columns.take(rows[[at]]).records()[0]

    def __iter__(self) -> Iterator[Record]:
        rows = np.arange(len(self))
        for start in range(0, len(self), _ROWS_AT_ONCE):
            yield from self.columns.take(rows[start : start + _ROWS_AT_ONCE]).records()


_BY_ROW = (*WHOLE, *TIMES, *OPTIONAL_TIMES, *OPTIONAL_WHOLE, *TIERS, *NAMED)
_NUMBERS = (*WHOLE, *TIMES, *OPTIONAL_TIMES, *OPTIONAL_WHOLE)


def starts_of(counts: Ints) -> Ints:
    """Where each of so many runs of values begins when they lie behind each other, and where the
    last one ends."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


def or_none(values: Floats) -> list[float | None]:
    """With None for NaN."""
    return [None if value != value else value for value in values.tolist()]


def whole_or_none(values: Floats) -> list[int | None]:
    """As integers, with None for NaN."""
    return [None if value != value else int(value) for value in values.tolist()]


class _Building:
    """Columns that grow by some records at a time."""

    def __init__(self) -> None:
        self._parts: dict[str, list[NDArray[Any]]] = {name: [] for name in (*_NUMBERS, *TIERS)}
        self._codes: dict[str, list[Ints]] = {name: [] for name in NAMED}
        self._names: dict[str, dict[str | None, int]] = {name: {} for name in NAMED}
        self._gaps: list[Floats] = []
        self._gap_counts: list[Ints] = []

    def add(self, records: Sequence[Record]) -> None:
        # Numpy makes NaN of None by itself where it is told to expect floats.
        for name in _NUMBERS:
            values = list(map(attrgetter(name), records))
            self._parts[name].append(np.array(values, _kind(name)))
        tiers = np.array([record.tiers or _NO_TIERS for record in records], np.float64)
        for name, column in zip(TIERS, tiers.T, strict=True):
            self._parts[name].append(column)
        for name in NAMED:
            codes = self._names[name]
            found = map(attrgetter(name), records)
            self._codes[name].append(
                np.array([codes.setdefault(each, len(codes)) for each in found], np.int64)
            )
        gaps = [record.gaps_s for record in records]
        self._gap_counts.append(np.array(list(map(len, gaps)), np.int64))
        self._gaps.append(np.fromiter(chain.from_iterable(gaps), np.float64))

    def columns(self) -> Columns:
        columns: dict[str, Any] = {
            name: _joined(parts, _kind(name)) for name, parts in self._parts.items()
        }
        for name in NAMED:
            codes = _joined(self._codes[name], np.int64)
            columns[name] = Coded(codes, tuple(self._names[name]))
        return Columns(
            **columns,
            gaps_s=_joined(self._gaps, np.float64),
            gap_starts=starts_of(_joined(self._gap_counts, np.int64)),
        )


def _kind(name: str) -> type[np.int64] | type[np.float64]:
    return np.int64 if name in WHOLE else np.float64


def _joined(parts: Sequence[NDArray[Any]], kind: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, kind)
