"""Takes rows from the event loop and has them written, whatever the database does meanwhile.

A row is in memory for a quarter of a second, then it is in the database; or, where that takes
longer, in a file (`gateway.ledger.spool`), from where it is replayed in order. It may be in both:
the database takes each id once. So a process that is killed loses what was noted in the last
fraction of a second.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import monotonic
from typing import Protocol, TypeVar

import structlog

from gateway.ledger.row import LedgerRow
from gateway.ledger.spool import Portion, Spool, SpoolRoom
from gateway.ledger.table import LedgerUnavailable

_log = structlog.get_logger("forebay.ledger")

T = TypeVar("T")

_ROWS_AT_ONCE = 500
_LONGEST_PAUSE_S = 2.0
_ADOPTION_S = 5.0
_BROKEN_FILE_S = 60.0
_SAY_AGAIN_S = 10.0


class RowTable(Protocol):
    """What the writer needs of `gateway.ledger.table.LedgerTable`."""

    async def insert(self, rows: Sequence[LedgerRow]) -> int:
        """How many rows were refused for good; raises LedgerUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class WriterTerms:
    """`interval_s` is how long rows are gathered, and how long one write may take before they go
    into the file as well. At most `most_rows` are held in memory."""

    interval_s: float = 0.25
    most_rows: int = 50_000


@dataclass(frozen=True, slots=True)
class LedgerStats:
    """Rows since the start: `written` to the database, twice where the first time seemed to fail;
    `spooled` to the file on their way there; `lost` for good. `waiting` are in memory,
    `spool_bytes` in the file. `lag_s` is the age of the oldest row of this process that the
    database lacks."""

    written: int
    spooled: int
    lost: int
    waiting: int
    spool_bytes: int
    lag_s: float


class LedgerWriter:
    """A `gateway.ledger.row.Ledger`. Belongs to the event loop."""

    def __init__(
        self,
        table: RowTable,
        spools: SpoolRoom,
        terms: WriterTerms = WriterTerms(),
    ) -> None:
        self._table = table
        self._spools = spools
        self._terms = terms
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forebay-ledger")
        # a row is in memory, then in the file or in the database: first come, first out of each
        self._waiting: deque[LedgerRow] = deque()
        self._spool: Spool | None = None
        self._spool_rows = 0
        self._spool_begins_s = 0.0
        self._left_memory = 0
        self._adopted: Spool | None = None
        self._adopt_at_s = 0.0
        self._away = False
        self._pause_s = self._retry_at_s = 0.0
        self._noted = self._written = self._spooled = self._lost = 0
        self._say_lost_at_s = 0.0
        self._disk_failed = self._closed = False
        self._awake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._progress = asyncio.Event()

    def note(self, row: LedgerRow) -> None:
        """One request is over. Never blocks or raises."""
        if self._closed:
            self._lose(1, "they come after the ledger was closed")
            return
        if len(self._waiting) >= self._terms.most_rows:
            self._lose(1, "too many wait for the database")
            return
        self._noted += 1
        self._waiting.append(row)
        if len(self._waiting) == 1:
            self._awake.set()

    def stats(self) -> LedgerStats:
        """As of now."""
        oldest_s = [_over_s(row) for row in islice(self._waiting, 1)]
        spool_bytes = _unread(self._spool)
        if spool_bytes:
            oldest_s.append(self._spool_begins_s)
        return LedgerStats(
            written=self._written,
            spooled=self._spooled,
            lost=self._lost,
            waiting=len(self._waiting),
            spool_bytes=spool_bytes,
            lag_s=max(0.0, time.time() - min(oldest_s)) if oldest_s else 0.0,
        )

    async def caught_up(self, within_s: float) -> bool:
        """Wait until everything that was noted so far is in the database; False if it is not in
        time, at once where the database is known not to answer."""
        target = self._noted
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._done < target and not self._away:
                    self._hurry.set()
                    await self._progress.wait()
        return self._done >= target

    @property
    def _done(self) -> int:
        """How many of those noted are neither in memory nor in the file any more."""
        return self._noted - len(self._waiting) - self._spool_rows

    @property
    def _resting(self) -> bool:
        """Whether the database is not to be asked again yet."""
        return monotonic() < self._retry_at_s

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._until_work()
            try:
                await self._turn()
            except Exception:  # noqa: BLE001 - whatever it was: nobody else writes these rows
                _log.exception("the ledger could not be written")
                self._put_off()

    async def close(self, within_s: float) -> None:
        """After `run` has ended: write what waits. What the database does not take in time stays in
        the file for the next process. What is noted after that is lost."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while (self._waiting or _unread(self._spool)) and not self._resting:
                    await self._turn()
        await self._spool_waiting()
        self._closed = True
        if self._waiting:
            self._lose(len(self._waiting), "neither database nor disk took them before the end")
            self._waiting.clear()
        for spool in (self._spool, self._adopted):
            if spool is not None:
                await self._let_go(spool)
        self._disk.shutdown()

    async def _until_work(self) -> None:
        """Until rows have been gathered, or something that was put off is due."""
        if not self._waiting and not _unread(self._spool) and not _unread(self._adopted):
            await _wait(self._awake, self._adopt_at_s - monotonic())
        replays = _unread(self._spool) or _unread(self._adopted)
        if self._resting or not (replays or len(self._waiting) >= _ROWS_AT_ONCE):
            await _wait(self._hurry, self._terms.interval_s)
        self._awake.clear()
        self._hurry.clear()

    async def _turn(self) -> None:
        """One portion of each, oldest first."""
        if self._resting:
            await self._spool_waiting()
            return
        try:
            if self._spool is not None and self._spool.unread_bytes:
                await self._spool_waiting()
                await self._replay(self._spool)
            elif self._waiting:
                await self._write()
            if self._adopted is not None or monotonic() >= self._adopt_at_s:
                await self._adopt()
        except LedgerUnavailable as failure:
            self._put_off()
            if not self._away:
                self._away = True
                _log.error(
                    "the ledger's database does not answer: rows wait in a file",
                    error=str(failure),
                )
            await self._spool_waiting()
        self._progress.set()
        self._progress = asyncio.Event()

    async def _write(self) -> None:
        """From memory to the database. Meanwhile the rows stay where they are, so that they can go
        into the file like those behind them."""
        rows = list(islice(self._waiting, _ROWS_AT_ONCE))
        last = self._left_memory + len(rows)
        await self._insert(rows)
        self._leave_memory(max(0, last - self._left_memory))

    async def _replay(self, spool: Spool) -> None:
        """From our file to the database."""
        try:
            portion = await self._on_disk(spool.read, _ROWS_AT_ONCE)
            if portion.rows:
                self._spool_begins_s = _over_s(portion.rows[0])
            await self._insert_portion(spool, portion)
        except OSError as error:
            _log.error("a file of the ledger cannot be read", error=error.strerror)
            self._spool, self._spool_rows = None, 0
            await self._let_go(spool)
            return
        self._spool_rows -= len(portion.rows) + portion.damaged

    async def _adopt(self) -> None:
        """From a file that another process has left behind to the database."""
        if self._adopted is None:
            self._adopt_at_s = monotonic() + _ADOPTION_S
            await self._on_disk(self._look_for_orphan)
        if (spool := self._adopted) is None:
            return
        try:
            if spool.unread_bytes:
                portion = await self._on_disk(spool.read, _ROWS_AT_ONCE)
                await self._insert_portion(spool, portion)
            if spool.unread_bytes:
                return
            self._adopt_at_s = 0.0  # there may be more
            _log.info("rows that another process had left in a file are in the database")
        except OSError as error:
            _log.error("a file of the ledger cannot be read", error=error.strerror)
            self._adopt_at_s = monotonic() + _BROKEN_FILE_S
            self._spools.pass_by(spool)
        self._adopted = None
        await self._let_go(spool)

    async def _insert_portion(self, spool: Spool, portion: Portion) -> None:
        if portion.rows:
            await self._insert(portion.rows)
        await self._on_disk(spool.replayed, portion)
        if portion.damaged:
            self._lose(portion.damaged, "their lines in a file are damaged")

    async def _insert(self, rows: Sequence[LedgerRow]) -> None:
        """Raises LedgerUnavailable. While it takes its time, what is noted goes into the file."""
        inserting = asyncio.ensure_future(self._table.insert(rows))
        try:
            while not (await asyncio.wait({inserting}, timeout=self._terms.interval_s))[0]:
                await self._spool_waiting()
        finally:
            if not inserting.done():
                inserting.cancel()
                await asyncio.gather(inserting, return_exceptions=True)
        refused = inserting.result()
        self._written += len(rows) - refused
        if refused:
            self._lose(refused, "the database refuses what is in them")
        self._pause_s = 0.0
        if self._away:
            self._away = False
            _log.info("the ledger's database answers again")

    async def _spool_waiting(self) -> None:
        """From memory to our file. Where that fails, they stay in memory."""
        rows = list(self._waiting)
        try:
            if rows:
                if not _unread(self._spool):
                    self._spool_begins_s = _over_s(rows[0])
                await self._on_disk(self._append, rows)
                self._leave_memory(len(rows))
                self._spool_rows += len(rows)
                self._spooled += len(rows)
            if self._spool is not None:
                await self._on_disk(self._spool.sync_if_due)
        except OSError as error:
            if not self._disk_failed:
                _log.error(
                    "rows of the ledger cannot be put into a file: they are in memory only",
                    error=error.strerror or type(error).__name__,
                )
            self._disk_failed = True
        else:
            self._disk_failed = False

    def _append(self, rows: Sequence[LedgerRow]) -> None:
        if self._spool is None:
            self._spool = self._spools.make()
        self._spool.append(rows)

    def _look_for_orphan(self) -> None:
        self._adopted = self._spools.adopt()

    async def _let_go(self, spool: Spool) -> None:
        try:
            await self._on_disk(spool.close)
        except OSError as error:
            _log.warning("a file of the ledger was not closed well", error=error.strerror)

    async def _on_disk(self, work: Callable[..., T], *arguments: object) -> T:
        """Off the event loop. What has begun is waited for, also when cancelled: files and our
        knowledge of them must not part."""
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(self._disk, partial(work, *arguments))
        try:
            return await asyncio.shield(working)
        finally:
            if not working.done():
                await asyncio.wait({working})

    def _leave_memory(self, count: int) -> None:
        for _ in range(count):
            self._waiting.popleft()
        self._left_memory += count

    def _put_off(self) -> None:
        self._pause_s = min(_LONGEST_PAUSE_S, max(self._terms.interval_s, 2 * self._pause_s))
        self._retry_at_s = monotonic() + self._pause_s

    def _lose(self, rows: int, why: str) -> None:
        self._lost += rows
        if monotonic() >= self._say_lost_at_s:
            self._say_lost_at_s = monotonic() + _SAY_AGAIN_S
            _log.error("rows of the ledger are lost", why=why, lost_so_far=self._lost)


def _unread(spool: Spool | None) -> int:
    return 0 if spool is None else spool.unread_bytes


def _over_s(row: LedgerRow) -> float:
    """When what the row is about was over; a charge for storage may be noted long after that."""
    return row.finished_s if row.kind == "request" else time.time()


async def _wait(event: asyncio.Event, at_most_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, at_most_s)):
            await event.wait()
