"""Rows that the database could not take yet, in files beside it.

Each process appends to a file of its own, which it holds locked for as long as it lives. A file
that nobody holds was left behind: whoever locks it first replays and removes it. Everything here
may block, and belongs to one thread.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import structlog

from gateway.ledger.row import LedgerRow
from gateway.ledger.row_text import from_line, to_lines

_log = structlog.get_logger("forebay.ledger")

_SUFFIX = ".jsonl"
_SYNC_S = 1.0
"""What is appended survives the process at once, and a power failure after this time."""
_READ_BYTES = 512 << 10
"""Of which a line takes a small part."""


class SpoolFull(OSError):
    """The file has reached its bound."""


class Portion(NamedTuple):
    """Rows read from a spool in order, the `damaged` lines between them, and where the rest
    begins."""

    rows: list[LedgerRow]
    damaged: int
    end: int


class Spool:
    """One file of rows, open and locked. Methods raise OSError."""

    def __init__(self, path: Path, descriptor: int, most_bytes: int) -> None:
        """Takes the descriptor over, with its lock."""
        self.path = path
        self._descriptor = descriptor
        self._most_bytes = most_bytes
        self._begin = 0
        self._end = os.fstat(descriptor).st_size
        self._synced_s = monotonic()
        self._unsynced = False

    @property
    def unread_bytes(self) -> int:
        """What has not been replayed."""
        return self._end - self._begin

    def append(self, rows: Sequence[LedgerRow]) -> None:
        """Add rows at the end, all or none of them."""
        lines = to_lines(rows)
        if self._end + len(lines) > self._most_bytes:
            raise SpoolFull
        written = 0
        try:
            while written < len(lines):
                written += os.pwrite(self._descriptor, lines[written:], self._end + written)
        except OSError:
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end += written
        self._unsynced = True

    def sync_if_due(self) -> None:
        """Have the disk keep what was appended, at most once per second."""
        if self._unsynced and monotonic() - self._synced_s >= _SYNC_S:
            self._sync()

    def read(self, most_rows: int) -> Portion:
        """The first rows that have not been replayed. A last line without an end was being written
        when its process died; it counts as damaged, like any other that is no row."""
        rows: list[LedgerRow] = []
        damaged = start = 0
        text = os.pread(self._descriptor, _READ_BYTES, self._begin)
        whole = len(text) < _READ_BYTES
        while start < len(text) and len(rows) + damaged < most_rows:
            end = text.find(b"\n", start)
            if end < 0 and not whole and start > 0:
                break  # its end is in the next portion
            row = from_line(text[start:end]) if end >= 0 else None
            if row is None:
                damaged += 1
            else:
                rows.append(row)
            start = end + 1 if end >= 0 else len(text)
        return Portion(rows, damaged, self._begin + start)

    def replayed(self, portion: Portion) -> None:
        """The portion's rows are in the database. Once all are, the file is empty again."""
        self._begin = portion.end
        if self._begin >= self._end:
            os.ftruncate(self._descriptor, 0)
            self._begin = self._end = 0
            self._unsynced = False

    def close(self) -> None:
        """Let go of the file; it is removed if nothing in it waits."""
        try:
            if self.unread_bytes == 0:
                self.path.unlink(missing_ok=True)
            elif self._unsynced:
                self._sync()
        finally:
            os.close(self._descriptor)

    def _sync(self) -> None:
        os.fsync(self._descriptor)
        self._synced_s = monotonic()
        self._unsynced = False


class SpoolRoom:
    """The directory of all spools of one machine's gateways."""

    def __init__(self, directory: Path, *, most_bytes: int) -> None:
        """`most_bytes` bounds each file. The directory must exist and be ours alone."""
        self._directory = directory
        self._most_bytes = most_bytes
        self._passed_by: set[Path] = set()

    def pass_by(self, spool: Spool) -> None:
        """It cannot be read: all others that were left behind are adopted before it."""
        self._passed_by.add(spool.path)

    def make(self) -> Spool:
        """A new spool, ours until it is closed."""
        # under a name by which nobody looks for it until it is locked
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        draft, path = self._directory / f".{name}", self._directory / f"{name}{_SUFFIX}"
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.rename(path)
        except OSError:
            os.close(descriptor)
            draft.unlink(missing_ok=True)
            raise
        return Spool(path, descriptor, self._most_bytes)

    def adopt(self) -> Spool | None:
        """A spool that was left behind, ours from now on, the oldest first; None if there is
        none."""
        found = set(self._directory.glob(f"*{_SUFFIX}"))
        self._passed_by &= found
        for path in sorted(found, key=lambda each: (each in self._passed_by, _changed_s(each))):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            except OSError as error:
                _log.warning("a file of the ledger cannot be read", error=error.strerror)
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # whoever held it may have finished with it between our two steps
                if os.fstat(descriptor).st_nlink > 0:
                    return Spool(path, descriptor, self._most_bytes)
            except BlockingIOError:
                pass
            except OSError as error:
                _log.warning("a file of the ledger cannot be locked", error=error.strerror)
            os.close(descriptor)
        return None


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
