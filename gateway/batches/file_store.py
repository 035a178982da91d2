"""The tenants' files, in the database."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from sqlalchemy import ColumnElement, Row, delete, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batches.batch import OPEN
from gateway.batches.file_draft import FileDraft
from gateway.batches.ids import first_id, is_id, new_id
from gateway.batches.stored_file import INPUT, FilePage, StoredFile
from gateway.batches.turns import Clock, take_turn
from gateway.database.opening import Transactions
from gateway.database.schema import batches, file_parts, files

_ABANDONED_S = 6 * 3600.0
"""No file takes that long to be written."""
_SWEPT_AT_ONCE = 1
"""A large file has hundreds of parts."""


class StorageFull(Exception):
    """The tenant's files and open batches hold as much as they may."""


class FileInUse(Exception):
    """A batch that has not ended reads this file."""


class FileStore:
    """Files of every tenant; each sees its own. Whatever is asked of it may raise SQLAlchemyError
    and OSError while the database is away."""

    def __init__(self, database: Transactions, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def draft(self) -> FileDraft:
        """A new file, to be used as a scope."""
        async with self._database.read() as connection:
            now_s = await self._clock(connection)
        return FileDraft(self._database, new_id("file-", now_s))

    async def keep(
        self, draft: FileDraft, tenant: str, filename: str, lives_s: float, most_bytes: int
    ) -> StoredFile:
        """Publish an upload that has ended. Raises StorageFull if the tenant would then hold more
        than `most_bytes`."""
        async with self._database.begin() as connection:
            await take_turn(connection, files_turn(tenant))
            now_s = await self._clock(connection)
            if await held_bytes(connection, tenant) + draft.size_bytes > most_bytes:
                raise StorageFull
            size_bytes = draft.size_bytes
            file = StoredFile(draft.id, tenant, filename, INPUT, size_bytes, now_s, now_s + lives_s)
            await draft.publish(connection, file)
        return file

    async def find(self, tenant: str, file_id: str) -> StoredFile | None:
        """The tenant's file of this name."""
        if not is_id("file-", file_id):
            return None
        async with self._database.read() as connection:
            return await find_file(connection, tenant, file_id, await self._clock(connection))

    async def page(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, ascending: bool
    ) -> FilePage:
        """Up to `limit` of the tenant's files behind the name `after`, by age."""
        async with self._database.read() as connection:
            query = select(files).where(
                files.c.tenant == tenant, _is_alive(await self._clock(connection))
            )
            if purpose is not None:
                query = query.where(files.c.purpose == purpose)
            if after is not None:
                query = query.where(files.c.id > after if ascending else files.c.id < after)
            order = files.c.id.asc() if ascending else files.c.id.desc()
            rows = (await connection.execute(query.order_by(order).limit(limit + 1))).all()
        return FilePage([_file(row) for row in rows[:limit]], len(rows) > limit)

    async def content(self, file_id: str) -> AsyncGenerator[bytes]:
        """Its bytes, part by part, each read by itself: a slow reader holds up nobody. Ends early
        if the file is deleted meanwhile."""
        part = 0
        while True:
            async with self._database.read() as connection:
                content = await connection.scalar(
                    select(file_parts.c.content).where(
                        file_parts.c.file == file_id, file_parts.c.part == part
                    )
                )
            if content is None:
                return
            yield bytes(content)
            part += 1

    async def delete(self, tenant: str, file_id: str) -> bool:
        """False if the tenant has no such file. Raises FileInUse."""
        if not is_id("file-", file_id):
            return False
        async with self._database.begin() as connection:
            await take_turn(connection, files_turn(tenant))
            now_s = await self._clock(connection)
            if await find_file(connection, tenant, file_id, now_s) is None:
                return False
            if await connection.scalar(select(_is_read(file_id))):
                raise FileInUse
            await _erase(connection, [file_id])
        return True

    async def sweep(self) -> None:
        """Delete what has expired, and parts of files that were never published."""
        while await self._sweep_expired():
            pass
        while await self._sweep_abandoned():
            pass

    async def _sweep_expired(self) -> bool:
        """Delete some; whether there were any."""
        async with self._database.begin() as connection:
            now_s = await self._clock(connection)
            rows = await connection.execute(
                select(files.c.id)
                .where(files.c.expires_s <= now_s, ~_is_read(files.c.id))
                .limit(_SWEPT_AT_ONCE)
                .with_for_update(skip_locked=True)
            )
            found = [row.id for row in rows]
            if found:
                await _erase(connection, found)
        return bool(found)

    async def _sweep_abandoned(self) -> bool:
        async with self._database.begin() as connection:
            before = first_id("file-", await self._clock(connection) - _ABANDONED_S)
            rows = await connection.execute(
                select(file_parts.c.file)
                .where(
                    file_parts.c.file < before,
                    file_parts.c.part == 0,
                    ~exists().where(files.c.id == file_parts.c.file),
                )
                .limit(_SWEPT_AT_ONCE)
            )
            found = [row.file for row in rows]
            if found:
                await connection.execute(delete(file_parts).where(file_parts.c.file.in_(found)))
        return bool(found)


def files_turn(tenant: str) -> str:
    """Whoever adds to what a tenant holds, or takes from it, has this turn."""
    return f"files of {tenant}"


async def held_bytes(connection: AsyncConnection, tenant: str) -> int:
    """What the tenant's files hold, and its open batches, whose lines are copies of their input."""
    own = select(func.coalesce(func.sum(files.c.bytes), 0)).where(files.c.tenant == tenant)
    copied = (
        select(func.coalesce(func.sum(files.c.bytes), 0))
        .select_from(batches.join(files, files.c.id == batches.c.input_file))
        .where(batches.c.tenant == tenant, batches.c.status.in_(OPEN))
    )
    return int(await connection.scalar(own) or 0) + int(await connection.scalar(copied) or 0)


async def find_file(
    connection: AsyncConnection, tenant: str, file_id: str, now_s: float
) -> StoredFile | None:
    """The tenant's file of this name, unless it has expired."""
    query = select(files).where(files.c.id == file_id, files.c.tenant == tenant, _is_alive(now_s))
    row = (await connection.execute(query)).first()
    return None if row is None else _file(row)


def _is_alive(now_s: float) -> ColumnElement[bool]:
    return or_(files.c.expires_s.is_(None), files.c.expires_s > now_s)


def _is_read(file_id: Any) -> ColumnElement[bool]:
    return exists().where(batches.c.input_file == file_id, batches.c.status.in_(OPEN))


async def _erase(connection: AsyncConnection, found: list[str]) -> None:
    await connection.execute(delete(files).where(files.c.id.in_(found)))
    await connection.execute(delete(file_parts).where(file_parts.c.file.in_(found)))


def _file(row: Row[Any]) -> StoredFile:
    return StoredFile(
        id=row.id,
        tenant=row.tenant,
        filename=row.filename,
        purpose=row.purpose,
        size_bytes=row.bytes,
        created_s=row.created_s,
        expires_s=row.expires_s,
    )
