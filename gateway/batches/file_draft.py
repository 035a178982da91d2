"""A file while it is being written."""

from __future__ import annotations

from types import TracebackType

import structlog
from sqlalchemy import delete, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batches.stored_file import StoredFile
from gateway.batches.turns import is_away
from gateway.database.opening import Transactions
from gateway.database.schema import file_parts, files

_log = structlog.get_logger("forebay.batch")

PART_BYTES = 1 << 20


class FileDraft:
    """Bytes go to the database in parts of 1 MiB, each in a transaction of its own, and no more
    than one part is in memory. Nobody sees the file before `publish`; what has not been published
    by the end of the scope is deleted, at the latest by the sweep."""

    def __init__(self, database: Transactions, file_id: str) -> None:
        self.id = file_id
        self.size_bytes = 0
        self._database = database
        self._pending = bytearray()
        self._parts = 0
        self._published = False

    async def write(self, data: bytes) -> None:
        """Add to its end."""
        self.size_bytes += len(data)
        self._pending += data
        while len(self._pending) >= PART_BYTES:
            await self._store(bytes(memoryview(self._pending)[:PART_BYTES]))
            del self._pending[:PART_BYTES]

    async def end(self) -> None:
        """Nothing more will be written."""
        if self._pending:
            await self._store(bytes(self._pending))
            self._pending.clear()

    async def publish(self, connection: AsyncConnection, file: StoredFile) -> None:
        """Let its tenant see it, once the transaction is committed. It must have ended."""
        await connection.execute(
            insert(files).values(
                id=file.id,
                tenant=file.tenant,
                filename=file.filename,
                purpose=file.purpose,
                bytes=file.size_bytes,
                created_s=file.created_s,
                expires_s=file.expires_s,
            )
        )
        self._published = True

    async def _store(self, content: bytes) -> None:
        async with self._database.begin() as connection:
            part = {"file": self.id, "part": self._parts, "content": content}
            await connection.execute(insert(file_parts).values(part))
        self._parts += 1

    async def __aenter__(self) -> FileDraft:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # a transaction that published it may have failed all the same: then the sweep finds it
        if self._published:
            return
        try:
            async with self._database.begin() as connection:
                await connection.execute(delete(file_parts).where(file_parts.c.file == self.id))
        except Exception as failure:
            if not is_away(failure):
                raise
            _log.warning("what was written of a file is left to the sweep", file=self.id)
