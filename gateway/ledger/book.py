"""The ledger as the gateway uses it: rows go in, and questions are answered from the database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.database.opening import Database
from gateway.database.schema import requests
from gateway.ledger.pages import Page, read_page
from gateway.ledger.row import LedgerRow
from gateway.ledger.table import LedgerUnavailable, asked
from gateway.ledger.usage import Usage, UsageQuery, read_usage
from gateway.ledger.writer import LedgerStats, LedgerWriter

_SPENT_S = 5.0
_USAGE_S = 30.0
_LONG_QUESTIONS = 2
"""At once. They may sort millions of rows, and each holds a connection that others need too."""


class LedgerBook:
    """A `gateway.ledger.row.Ledger` that can be read. Belongs to the event loop."""

    def __init__(self, database: Database, writer: LedgerWriter) -> None:
        self._database = database
        self._writer = writer
        self._long_questions = asyncio.Semaphore(_LONG_QUESTIONS)

    def note(self, row: LedgerRow) -> None:
        """One request is over. Never blocks or raises."""
        self._writer.note(row)

    def stats(self) -> LedgerStats:
        """How the writing goes."""
        return self._writer.stats()

    async def spent(self, tenant: str, key: str | None, model: str | None, since_s: float) -> int:
        """What a tenant, or one of its keys, has spent since a Unix time, on everything or on one
        model, in nUSD. What this process has noted so far is in it.

        Raises LedgerUnavailable.
        """
        if not await self._writer.caught_up(_SPENT_S):
            raise LedgerUnavailable("rows wait for the database")
        sum_of = select(func.coalesce(func.sum(requests.c.cost_nusd), 0)).where(
            requests.c.tenant == tenant, requests.c.finished_s >= since_s
        )
        if key is not None:
            sum_of = sum_of.where(requests.c.key == key)
        if model is not None:
            sum_of = sum_of.where(requests.c.model == model)
        async with asked(self._database.read(), within_s=_SPENT_S) as connection:
            return int((await connection.execute(sum_of)).scalar_one())

    async def usage(self, *queries: UsageQuery) -> list[list[Usage]]:
        """The groups of each query. What this process has noted so far is in them, if the database
        takes it soon. Raises LedgerUnavailable and TooManyGroups."""
        await self._writer.caught_up(1.0)
        async with self._long_question() as connection:
            return [await read_usage(connection, query) for query in queries]

    async def pages(
        self, start_s: float, end_s: float, tenant: str | None = None
    ) -> AsyncGenerator[Page]:
        """Every row of that time in order, of one tenant or of all. Rows that come meanwhile may be
        missed. Raises LedgerUnavailable."""
        await self._writer.caught_up(1.0)
        after = None
        while True:
            async with self._long_question() as connection:
                page = await read_page(connection, start_s, end_s, tenant, after)
            yield page
            if page.last is None:
                return
            after = page.last

    @asynccontextmanager
    async def _long_question(self) -> AsyncIterator[AsyncConnection]:
        async with (
            self._long_questions,
            asked(self._database.read(), within_s=_USAGE_S) as connection,
        ):
            yield connection
