"""A run as a file: everything about it, every record, and its figures for readers without ours.

The file is JSON, compressed if its name ends in ".gz". `format` and `version` say what it is, `run`
is the run without its records, `summary` has its figures, and `records` one list per field of them,
or null if that field is known of none. Times of records are rounded to the nanosecond. Of a field
with few distinct values, the list holds places in a list of values beside it. The gaps of all
records lie behind each other, and beside them is how many each has.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from loadtest.columns import (
    NAMED,
    OPTIONAL_TIMES,
    OPTIONAL_WHOLE,
    TIERS,
    TIMES,
    WHOLE,
    Coded,
    ColumnRecords,
    Columns,
    Floats,
    starts_of,
    whole_or_none,
)
from loadtest.hidden_keys import without_keys
from loadtest.plan import TenantPlan
from loadtest.record import ClientHealth, Outcome, Run, Sample
from loadtest.summary import summarize

FORMAT = "forebay loadtest run"
VERSION = 1

_DECIMALS = 9
"""Of a second."""
_COMPRESSION = 3
"""Of 9: for such columns, 6 takes three times as long for a twentieth less."""
_GZIP_MAGIC = b"\x1f\x8b"
_Name = TypeVar("_Name")
_Number = TypeVar("_Number", np.int64, np.float64)


def write_run(path: Path, run: Run, *, keys: Iterable[str] = ()) -> None:
    """Write a run, its records and its figures. What was there before is replaced once all of that
    is written. Raises OSError.

    No key gets into the file: wherever one of `keys` or of those that the environment holds for the
    run's tenants stands in a text, such as a command line or what a server gave as its reason, the
    file says "[key]".
    """
    held = [os.environ.get(tenant.key_env) for tenant in run.tenants if tenant.key_env]
    run = without_keys(run, [key for key in (*keys, *held) if key])
    data = orjson.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "run": _head_of(run),
            "summary": summarize(run),
            "records": _lists_of(Columns.of(run.records)),
        },
        option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS,
    )
    if path.name.endswith(".gz"):
        data = gzip.compress(data, compresslevel=_COMPRESSION, mtime=0)
    beside = path.with_name(f"{path.name}.part")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_run(path: Path) -> Run:
    """The run of a file; its records are made when they are asked for. Raises OSError, and
    ValueError with one line for a file that is none, is damaged or has another version."""
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP_MAGIC):
            data = _decompressed(data)
        _check_version(data)
        document = msgspec.json.decode(data, type=_Document)
        columns = _columns_of(document.records)
        return _run_of(document.run, ColumnRecords(columns))
    except (_FormatError, msgspec.DecodeError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from None


class _FormatError(Exception):
    """Why a file cannot be read, in one line."""


class _Marks(msgspec.Struct):
    format: str
    version: int


class _Head(msgspec.Struct):
    name: str
    kind: Literal["live", "simulated"]
    target: str
    workload: str
    command: str
    began_at: str
    wall_s: float
    tenants: tuple[TenantPlan, ...]
    settings: dict[str, str]
    machine: tuple[str, ...]
    timeline: dict[str, list[float | None]]
    client: dict[str, Any] | None
    usd_per_hour: float | None
    notes: tuple[str, ...]


class _Names(msgspec.Struct, Generic[_Name]):
    values: tuple[_Name, ...]
    places: list[int]


class _Gaps(msgspec.Struct):
    seconds: list[float]
    counts: list[int]


class _Lists(msgspec.Struct):
    """`Columns` as the file has them."""

    index: list[int]
    due_s: list[float]
    sent_s: list[float]
    ended_s: list[float]
    outcome: _Names[Outcome]
    prompt_tokens: list[int]
    output_tokens: list[int]
    first_s: list[float | None] | None
    last_s: list[float | None] | None
    publish_s: list[float | None] | None
    cached_tokens: list[int | None] | None
    device_tokens: list[int | None] | None
    dram_tokens: list[int | None] | None
    redis_tokens: list[int | None] | None
    tenant: _Names[str]
    label: _Names[str]
    reason: _Names[str | None]
    gaps: _Gaps
    price_nusd: list[int | None] | None
    replica: _Names[str]
    stall_s: list[float]


class _Document(msgspec.Struct):
    run: _Head
    records: _Lists


def _head_of(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "kind": run.kind,
        "target": run.target,
        "workload": run.workload,
        "command": run.command,
        "began_at": run.began_at,
        "wall_s": run.wall_s,
        "tenants": run.tenants,
        "settings": dict(run.settings),
        "machine": run.machine,
        "timeline": {
            name: [getattr(sample, name) for sample in run.timeline] for name in Sample._fields
        },
        "client": None if run.client is None else run.client._asdict(),
        "usd_per_hour": run.usd_per_hour,
        "notes": run.notes,
    }


def _run_of(head: _Head, records: ColumnRecords) -> Run:
    return Run(
        name=head.name,
        kind=head.kind,
        target=head.target,
        workload=head.workload,
        command=head.command,
        began_at=head.began_at,
        wall_s=head.wall_s,
        records=records,
        tenants=head.tenants,
        settings=head.settings,
        machine=head.machine,
        timeline=_timeline_of(head.timeline),
        client=None if head.client is None else _client_of(head.client),
        usd_per_hour=head.usd_per_hour,
        notes=head.notes,
    )


def _timeline_of(lists: dict[str, list[float | None]]) -> tuple[Sample, ...]:
    columns = [lists.get(name) for name in Sample._fields]
    if None in columns or len({len(column) for column in columns if column is not None}) != 1:
        raise _FormatError("damaged: the timeline's lists do not belong together")
    return msgspec.convert(list(zip(*columns, strict=True)), tuple[Sample, ...])


def _client_of(fields: dict[str, Any]) -> ClientHealth:
    return msgspec.convert([fields.get(name) for name in ClientHealth._fields], ClientHealth)


def _lists_of(columns: Columns) -> dict[str, Any]:
    lists: dict[str, Any] = {name: np.ascontiguousarray(getattr(columns, name)) for name in WHOLE}
    for name in TIMES:
        lists[name] = _rounded(getattr(columns, name))
    for name in OPTIONAL_TIMES:
        lists[name] = _null_if_unknown(_rounded(getattr(columns, name)))
    for name in (*OPTIONAL_WHOLE, *TIERS):
        known = _null_if_unknown(getattr(columns, name))
        lists[name] = None if known is None else whole_or_none(known)
    for name in NAMED:
        column = getattr(columns, name)
        lists[name] = {"values": column.names, "places": np.ascontiguousarray(column.codes)}
    lists["gaps"] = {"seconds": _rounded(columns.gaps_s), "counts": columns.gap_counts}
    return lists


def _columns_of(lists: _Lists) -> Columns:
    count = len(lists.index)
    columns: dict[str, Any] = {
        name: _checked(np.array(getattr(lists, name), np.int64), count, name) for name in WHOLE
    }
    for name in (*TIMES, *OPTIONAL_TIMES, *OPTIONAL_WHOLE, *TIERS):
        values = getattr(lists, name)
        known = np.full(count, np.nan) if values is None else np.array(values, np.float64)
        columns[name] = _checked(known, count, name)
    for name in NAMED:
        named = getattr(lists, name)
        codes = _checked(np.array(named.places, np.int64), count, name)
        if count and not (codes.min() >= 0 and codes.max() < len(named.values)):
            raise _FormatError(f"damaged: {name} has places without a value")
        if len(set(named.values)) < len(named.values):
            raise _FormatError(f"damaged: {name} has a value twice")
        columns[name] = Coded(codes, named.values)
    gap_counts = _checked(np.array(lists.gaps.counts, np.int64), count, "gaps")
    gap_starts = starts_of(gap_counts)
    if (gap_counts < 0).any() or gap_starts[-1] != len(lists.gaps.seconds):
        raise _FormatError("damaged: there are more or fewer gaps than records have")
    gaps_s = np.array(lists.gaps.seconds, np.float64)
    return Columns(**columns, gaps_s=gaps_s, gap_starts=gap_starts)


def _checked(values: NDArray[_Number], count: int, name: str) -> NDArray[_Number]:
    if len(values) != count:
        raise _FormatError(f"damaged: {name} has {len(values)} values for {count} records")
    return values


def _rounded(values: Floats) -> Floats:
    return np.round(values, _DECIMALS)


def _null_if_unknown(values: Floats) -> Floats | None:
    return None if np.isnan(values).all() else values


def _check_version(data: bytes) -> None:
    try:
        marks = msgspec.json.decode(data, type=_Marks)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _FormatError("this is no run of a load test, or only a part of one") from None
    if marks.format != FORMAT:
        raise _FormatError(f"this is no {FORMAT}: it says that it is a {marks.format!r}")
    if marks.version != VERSION:
        raise _FormatError(
            f"has version {marks.version} of its format, and this forebay reads version {VERSION}"
        )


def _decompressed(data: bytes) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise _FormatError(f"damaged: it cannot be decompressed ({error})") from None
