"""A worker's log lines, as lines of the gateway's log."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import orjson
import structlog

_log = structlog.get_logger("forebay.worker")

_LONGEST_LINE_BYTES = 1 << 16
_OWN_FIELDS = frozenset({"message", "event", "level", "logger", "timestamp", "replica", "exc_info"})
_LEVELS = {"debug", "info", "warning", "error", "critical"}


class LogRelay(asyncio.Protocol):
    """Reads the standard error of one worker.

    Structured lines keep logger, level and fields; anything else, such as a traceback or a
    library's remark, is a warning that quotes it. All carry the replica's name, and go through the
    gateway's redactor. `done` is set when the last has been read.
    """

    def __init__(self, replica: str) -> None:
        self.done = asyncio.Event()
        self._replica = replica
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._relay(line)

    def connection_lost(self, _error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._relay(self._rest)
        self._rest = b""
        self.done.set()

    def _relay(self, line: bytes) -> None:
        if not line.strip():
            return
        entry = _entry(line)
        if entry is None:
            quoted = line[:_LONGEST_LINE_BYTES].decode("utf-8", "replace")
            _log.warning("the worker wrote", replica=self._replica, line=quoted)
            return
        level = logging.getLevelName(str(entry["level"]).upper())
        fields = {
            name: value
            for name, value in entry.items()
            if name not in _OWN_FIELDS and not name.startswith("_")
        }
        logger = structlog.get_logger(str(entry.get("logger", "forebay.worker")))
        logger.log(level, str(entry["message"]), replica=self._replica, **fields)


def _entry(line: bytes) -> dict[str, Any] | None:
    """The fields of a structured line; None for any other."""
    if not line.startswith(b"{"):
        return None
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(entry, dict) or "message" not in entry:
        return None
    if str(entry.get("level")) not in _LEVELS:
        return None
    return cast("dict[str, Any]", entry)
