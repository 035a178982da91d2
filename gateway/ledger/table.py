"""The ledger's table: rows go in once, and old ones go out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from operator import attrgetter

from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.database.opening import Database, kind_of
from gateway.database.schema import requests
from gateway.ledger.row import LedgerRow
from gateway.ledger.row_text import storable

_ROWS_AT_ONCE = 200
"""Binding a row's values takes the event loop about 10 µs."""
_FAULTS_OF_ROWS = ("22", "23")
"""Classes of SQLSTATE: wrong data, and what a constraint refuses."""


class LedgerUnavailable(Exception):
    """The database has not done what it was asked for, or not in time."""


class RowRefused(Exception):
    """The database answers, and will never take one of these rows."""


@asynccontextmanager
async def asked(
    transaction: AbstractAsyncContextManager[AsyncConnection], *, within_s: float
) -> AsyncIterator[AsyncConnection]:
    """The transaction. Raises LedgerUnavailable where the database cannot be reached or takes
    longer, RowRefused where it is a row that is wrong."""
    try:
        async with asyncio.timeout(within_s), transaction as connection:
            yield connection
    except TimeoutError:
        raise LedgerUnavailable("no answer in time") from None
    except (SQLAlchemyError, OSError) as error:
        # their texts hold statements and addresses, so that the kind has to do
        if isinstance(error, DBAPIError) and _is_refusal(error):
            raise RowRefused(type(error).__name__) from error
        raise LedgerUnavailable(kind_of(error)) from error


class LedgerTable:
    """Writes `requests`."""

    def __init__(self, database: Database, *, within_s: float = 10.0) -> None:
        """`within_s` bounds each transaction."""
        self._database = database
        self._within_s = within_s
        dialect = database.engine.dialect
        insert = postgresql.insert if dialect.name == "postgresql" else sqlite.insert
        # compiled once: for every row again, SQLAlchemy would take twice the time
        compiled = (
            insert(requests).on_conflict_do_nothing(index_elements=["id"]).compile(dialect=dialect)
        )
        self._insert = str(compiled)
        if compiled.positiontup is None:
            raise AssertionError("both dialects bind by position")
        self._values_of = attrgetter(*compiled.positiontup)

    async def insert(self, rows: Sequence[LedgerRow]) -> int:
        """Have the rows, made `storable`, in the table; one whose id is there already is left as it
        is. Returns how many the database refused for what is in them. Raises
        LedgerUnavailable: then some may be there."""
        try:
            await self._insert_all(rows)
        except RowRefused:
            if len(rows) == 1:
                return 1
            middle = len(rows) // 2
            return await self.insert(rows[:middle]) + await self.insert(rows[middle:])
        return 0

    async def _insert_all(self, rows: Sequence[LedgerRow]) -> None:
        async with asked(self._database.begin(), within_s=self._within_s) as connection:
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                piece = rows[start : start + _ROWS_AT_ONCE]
                values = [self._values_of(storable(row)) for row in piece]
                await connection.exec_driver_sql(self._insert, values)

    async def delete_before(self, time_s: float, *, most: int) -> int:
        """Delete rows of requests that were over before this Unix time, the oldest first; how many
        there were. Raises LedgerUnavailable."""
        oldest = (
            select(requests.c.id)
            .where(requests.c.finished_s < time_s)
            .order_by(requests.c.finished_s)
            .limit(most)
        )
        async with asked(self._database.begin(), within_s=self._within_s) as connection:
            gone = await connection.execute(delete(requests).where(requests.c.id.in_(oldest)))
            return gone.rowcount


def _is_refusal(error: DBAPIError) -> bool:
    state = getattr(error.orig, "sqlstate", None) or ""
    return isinstance(error, DataError | IntegrityError) or state[:2] in _FAULTS_OF_ROWS
