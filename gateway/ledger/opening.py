"""Opens the ledger: what writes it, what ages it, and what reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from gateway.database.opening import Database
from gateway.ended_tasks import end_task
from gateway.ledger.book import LedgerBook
from gateway.ledger.metrics import LedgerCollector
from gateway.ledger.retention import keep_ageing
from gateway.ledger.spool import SpoolRoom
from gateway.ledger.table import LedgerTable
from gateway.ledger.writer import LedgerWriter, WriterTerms
from gateway.state_dir import StateDir

_DIRECTORY = "ledger"
_MOST_SPOOL_BYTES = 256 << 20
_CLOSE_S = 5.0
_TERMS = WriterTerms()


@asynccontextmanager
async def open_ledger(
    database: Database,
    state_dir: StateDir,
    retention_s: Callable[[], float],
    collector: LedgerCollector | None = None,
    *,
    terms: WriterTerms = _TERMS,
    close_within_s: float = _CLOSE_S,
) -> AsyncIterator[LedgerBook]:
    """A ledger that is written until the scope ends, and then once more. The database must stay
    open longer.

    `retention_s` is how long rows are kept, as the settings in use have it. What the database does
    not take waits in the state directory. At the end what is left is written within about
    `close_within_s`, or stays there for the next process. Raises ConfigError where the state
    directory cannot be used.
    """
    spools = SpoolRoom(state_dir.private_directory(_DIRECTORY), most_bytes=_MOST_SPOOL_BYTES)
    table = LedgerTable(database)
    writer = LedgerWriter(table, spools, terms)
    if collector is not None:
        collector.watch(writer.stats)
    async with AsyncExitStack() as scope:
        scope.push_async_callback(writer.close, close_within_s)
        for work in (writer.run(), keep_ageing(table, retention_s)):
            scope.push_async_callback(end_task, asyncio.create_task(work))
        yield LedgerBook(database, writer)
