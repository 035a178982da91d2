"""The tenants' batches, in the database: what a tenant may ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import orjson
from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batches.batch import OPEN, Batch, BatchPage, BatchStatus, Counts, batch_of
from gateway.batches.file_store import StorageFull, files_turn, find_file, held_bytes
from gateway.batches.ids import is_id, new_id
from gateway.batches.line_store import LineState
from gateway.batches.stored_file import INPUT
from gateway.batches.turns import Clock, take_turn
from gateway.database.opening import Transactions
from gateway.database.schema import batch_lines, batches
from gateway.tenants import Caller

MOST_OPEN_BATCHES = 100
"""Of one tenant."""


class NoInputFile(Exception):
    """There is no such file, or it is no batch's input."""


class TooManyBatches(Exception):
    """The tenant has as many open batches as it may have."""


class CannotCancel(Exception):
    """The batch has ended, or is about to."""

    def __init__(self, status: BatchStatus) -> None:
        super().__init__(status)
        self.status = status


class BatchStore:
    """Batches of every tenant; each sees its own. Whatever is asked of it may raise SQLAlchemyError
    and OSError while the database is away."""

    def __init__(self, database: Transactions, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def create(
        self,
        caller: Caller,
        input_file: str,
        endpoint: str,
        metadata: Mapping[str, str],
        *,
        window_s: float,
        most_bytes: int,
    ) -> Batch:
        """A new one, whose input is still to be validated.

        Raises NoInputFile; TooManyBatches; StorageFull if the tenant's files and open batches would
        then hold more than `most_bytes`.
        """
        tenant = caller.tenant.id
        if not is_id("file-", input_file):
            raise NoInputFile
        async with self._database.begin() as connection:
            await take_turn(connection, files_turn(tenant))
            now_s = await self._clock(connection)
            file = await find_file(connection, tenant, input_file, now_s)
            if file is None or file.purpose != INPUT:
                raise NoInputFile
            if await _open_batches(connection, tenant) >= MOST_OPEN_BATCHES:
                raise TooManyBatches
            if await held_bytes(connection, tenant) + file.size_bytes > most_bytes:
                raise StorageFull
            batch_id = new_id("batch_", now_s)
            await connection.execute(
                insert(batches).values(
                    id=batch_id,
                    tenant=tenant,
                    key=caller.key.id,
                    endpoint=endpoint,
                    input_file=file.id,
                    window_s=window_s,
                    status=BatchStatus.VALIDATING.value,
                    metadata=orjson.dumps(dict(metadata)).decode(),
                    errors="[]",
                    created_s=now_s,
                    expires_s=now_s + window_s,
                )
            )
            row = (await connection.execute(select(batches).where(batches.c.id == batch_id))).one()
        return batch_of(row)

    async def find(self, tenant: str, batch_id: str) -> tuple[Batch, Counts] | None:
        """The tenant's batch of this name, and how far it is."""
        if not is_id("batch_", batch_id):
            return None
        async with self._database.read() as connection:
            return await _find(connection, tenant, batch_id)

    async def page(self, tenant: str, *, after: str | None, limit: int) -> BatchPage:
        """Up to `limit` of the tenant's batches that are older than `after`, the newest first."""
        query = select(batches).where(batches.c.tenant == tenant)
        if after is not None:
            query = query.where(batches.c.id < after)
        async with self._database.read() as connection:
            rows = await connection.execute(query.order_by(batches.c.id.desc()).limit(limit + 1))
            found = [batch_of(row) for row in rows]
            counts = await _count(connection, found[:limit])
        return BatchPage([(each, counts[each.id]) for each in found[:limit]], len(found) > limit)

    async def cancel(self, tenant: str, batch_id: str) -> tuple[Batch, Counts] | None:
        """Start no more of its lines; None if there is none. What is being cancelled already is
        left as it is. Raises CannotCancel."""
        if not is_id("batch_", batch_id):
            return None
        async with self._database.begin() as connection:
            now_s = await self._clock(connection)
            await connection.execute(
                update(batches)
                .where(
                    batches.c.id == batch_id,
                    batches.c.tenant == tenant,
                    batches.c.status.in_((BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)),
                )
                # whoever validates it loses it
                .values(status=BatchStatus.CANCELLING.value, cancelling_s=now_s, lease_owner=None)
            )
            found = await _find(connection, tenant, batch_id)
        if found is not None and found[0].status not in (
            BatchStatus.CANCELLING,
            BatchStatus.CANCELLED,
        ):
            raise CannotCancel(found[0].status)
        return found


async def _open_batches(connection: AsyncConnection, tenant: str) -> int:
    query = select(func.count()).select_from(batches)
    open_ones = query.where(batches.c.tenant == tenant, batches.c.status.in_(OPEN))
    return int(await connection.scalar(open_ones) or 0)


async def _find(
    connection: AsyncConnection, tenant: str, batch_id: str
) -> tuple[Batch, Counts] | None:
    query = select(batches).where(batches.c.id == batch_id, batches.c.tenant == tenant)
    row = (await connection.execute(query)).first()
    if row is None:
        return None
    batch = batch_of(row)
    return batch, (await _count(connection, [batch]))[batch.id]


async def _count(connection: AsyncConnection, found: Iterable[Batch]) -> dict[str, Counts]:
    """How far each is. What a validation has not finished with is not counted."""
    totals = {batch.id: batch.total for batch in found}
    counted = await connection.execute(
        select(batch_lines.c.batch, batch_lines.c.state, func.count().label("lines"))
        .where(batch_lines.c.batch.in_(list(totals)))
        .where(batch_lines.c.state.in_((LineState.COMPLETED, LineState.FAILED)))
        .group_by(batch_lines.c.batch, batch_lines.c.state)
    )
    lines = {(row.batch, row.state): row.lines for row in counted}
    return {
        name: Counts(
            total,
            completed=lines.get((name, LineState.COMPLETED.value), 0),
            failed=lines.get((name, LineState.FAILED.value), 0),
        )
        for name, total in totals.items()
    }
