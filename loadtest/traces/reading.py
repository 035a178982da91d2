"""A trace from a file, whatever its format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import orjson

from loadtest.trace import Trace
from loadtest.traces.azure import COLUMNS, columns_of, read_azure
from loadtest.traces.lines import TraceError, lines_of
from loadtest.traces.mooncake import MARK, read_mooncake
from loadtest.traces.own import read_own

SHIPPED: Mapping[str, Path] = {
    "mooncake": Path(__file__).with_name("data") / "mooncake_conversation_6min.jsonl.gz",
}
"""Traces that come with forebay, by name: the first tenth of Mooncake's conversation trace."""

_READERS: Mapping[str, Callable[[Path], Trace]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "own": read_own,
}
AUTO = "auto"
FORMATS = (AUTO, *_READERS)


def read_trace(path: Path | str, format: str = AUTO) -> Trace:  # noqa: A002 - the word for it
    """The trace in a file, or the one of `SHIPPED` that has this name; a name that ends in `.gz`
    is unpacked. `format` is one of `FORMATS`; `auto` looks at the first line.

    Requests are in the order of arrival, and times count from the first one. Raises TraceError,
    which names file, line and field, and ValueError for another format.
    """
    if format not in FORMATS:
        raise ValueError(f"no format {format}; there are {', '.join(FORMATS)}")
    file = trace_path(path)
    trace = _READERS[_sniffed(file) if format == AUTO else format](file)
    if not trace.requests:
        raise TraceError(f"{file}: is empty")
    first_s = min(request.at_s for request in trace.requests)
    requests = [request._replace(at_s=request.at_s - first_s) for request in trace.requests]
    requests.sort(key=lambda request: request.at_s)
    return replace(trace, requests=requests)


def trace_path(name: Path | str) -> Path:
    """Where a trace lies: the one of `SHIPPED` that has this name, else the file."""
    return SHIPPED.get(str(name)) or Path(name)


def _sniffed(path: Path) -> str:
    first = next(lines_of(path), None)
    if first is None:
        raise TraceError(f"{path}: is empty")
    place, line = first
    if set(COLUMNS) & set(columns_of(line)):
        return "azure"
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise place.wrong("is neither a JSON object nor a header with " + ", ".join(COLUMNS))
    return "mooncake" if MARK in value else "own"
