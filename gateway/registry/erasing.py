"""Erases what a tenant has stored in the database, but for its accounts."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Table, and_, delete, select

from gateway.database.opening import Transactions
from gateway.database.schema import batch_lines, batches, file_parts, files

_LINES = 1_000
_PARTS = 16
"""A transaction is kept short: in SQLite the ledger waits for it."""


@dataclass(frozen=True, slots=True)
class ErasedWork:
    """How many there were."""

    files: int
    batches: int


async def erase_work(database: Transactions, tenant_id: str) -> ErasedWork:
    """Delete a tenant's batches, then its files, a piece at a time. What is erased when it fails
    stays erased. Raises SQLAlchemyError."""
    ended = 0
    while (batch := await _any_of(database, batches, tenant_id)) is not None:
        # the batch itself last: its lines could not be found without it
        await _erase_pieces(database, batch_lines, "batch", "line", batch, _LINES)
        await _erase_one(database, batches, batch)
        # those of a validation that was under way; it writes no more once the batch is gone
        await _erase_pieces(database, batch_lines, "batch", "line", batch, _LINES)
        ended += 1
    removed = 0
    while (file := await _any_of(database, files, tenant_id)) is not None:
        await _erase_pieces(database, file_parts, "file", "part", file, _PARTS)
        await _erase_one(database, files, file)
        removed += 1
    return ErasedWork(files=removed, batches=ended)


async def _any_of(database: Transactions, table: Table, tenant_id: str) -> str | None:
    async with database.read() as connection:
        found: str | None = await connection.scalar(
            select(table.c.id).where(table.c.tenant == tenant_id).limit(1)
        )
        return found


async def _erase_one(database: Transactions, table: Table, row_id: str) -> None:
    async with database.begin() as connection:
        await connection.execute(delete(table).where(table.c.id == row_id))


async def _erase_pieces(
    database: Transactions, table: Table, owner: str, number: str, owner_id: str, at_once: int
) -> None:
    own: ColumnElement[bool] = table.c[owner] == owner_id
    while True:
        async with database.begin() as connection:
            query = select(table.c[number]).where(own).order_by(table.c[number]).limit(at_once)
            last = (await connection.scalars(query)).all()
            if not last:
                return
            await connection.execute(delete(table).where(and_(own, table.c[number] <= last[-1])))
