"""How batches move from one status to the next, for whoever does the work.

Checking a batch's input and writing its files is done by one gateway at a time, which holds the
batch's lease and loses it if it is silent for too long. Its steps check that it still holds it.
"""

from __future__ import annotations

from typing import NamedTuple

import orjson
from sqlalchemy import ColumnElement, and_, delete, exists, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batches.batch import OPEN, Batch, BatchError, BatchStatus, batch_of, errors_text
from gateway.batches.line_store import (
    LEASE_S,
    UNFINISHED,
    delete_lines,
    end_unfinished,
    enqueued_tokens,
    is_run,
    may_be_taken,
)
from gateway.batches.turns import Clock, take_turn
from gateway.database.opening import Transactions
from gateway.database.schema import batch_lines, batches, keys

CANCEL_GRACE_S = 60.0
"""How long lines that run when their batch is cancelled may take to end."""
_ASKED_AT_ONCE = 10_000
_CAN_CLOSE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)

FINISHING = (BatchStatus.FINALIZING, BatchStatus.CANCELLING)
"""Their files are being written, or will be once none of their lines runs any more."""


class LeaseLost(Exception):
    """Somebody else has the batch now, or it was cancelled or deleted, or this gateway leaves."""


class Waiting(NamedTuple):
    """A batch that something can be done for, and who made it."""

    id: str
    tenant: str
    key: str
    endpoint: str


class BatchProgress:
    """Batches of every tenant. `owner` names this gateway among those that share the database.
    Whatever is asked of it may raise SQLAlchemyError and OSError while the database is away."""

    def __init__(self, database: Transactions, clock: Clock, owner: str) -> None:
        self._database = database
        self._clock = clock
        self._owner = owner
        self._leaving = False

    def leave(self) -> None:
        """From now on this gateway holds nothing."""
        self._leaving = True

    async def runnable(self) -> list[Waiting]:
        """Batches with lines that may be run now, the oldest first."""
        async with self._database.read() as connection:
            now_s = await self._clock(connection)
            has_lines = exists().where(batch_lines.c.batch == batches.c.id, may_be_taken(now_s))
            return await _waiting(
                connection, and_(batches.c.status == BatchStatus.IN_PROGRESS, has_lines)
            )

    async def to_validate(self) -> list[Waiting]:
        """Batches whose input nobody is checking."""
        async with self._database.read() as connection:
            free = _is_free(await self._clock(connection))
            return await _waiting(
                connection, and_(batches.c.status == BatchStatus.VALIDATING, free)
            )

    async def to_finish(self) -> list[Waiting]:
        """Batches whose files nobody is writing: all their lines have ended, or will not be run."""
        async with self._database.read() as connection:
            now_s = await self._clock(connection)
            return await _waiting(connection, and_(_can_finish(now_s), _is_free(now_s)))

    async def claim_to_validate(self, batch_id: str) -> Batch | None:
        """Take the batch's lease; None if somebody else was faster."""
        async with self._database.begin() as connection:
            now_s = await self._clock(connection)
            validating = batches.c.status == BatchStatus.VALIDATING
            return await self._claim(connection, batch_id, now_s, validating)

    async def claim_to_finish(self, batch_id: str) -> Batch | None:
        """Take the batch's lease; None if somebody else was faster."""
        async with self._database.begin() as connection:
            now_s = await self._clock(connection)
            return await self._claim(connection, batch_id, now_s, _can_finish(now_s))

    async def clear(self, batch: Batch) -> None:
        """Delete what another gateway has written of its lines, while it is to be validated. Raises
        LeaseLost."""
        more = True
        while more:
            async with self._database.begin() as connection:
                await self.hold(connection, batch.id, BatchStatus.VALIDATING)
                more = await delete_lines(connection, batch.id)

    async def end_lines(self, batch: Batch) -> None:
        """End those of its lines that will not be run; from here on none of them changes. Raises
        LeaseLost."""
        why = _why_unfinished(batch)
        more = True
        while more:
            async with self._database.begin() as connection:
                await self.hold(connection, batch.id, *FINISHING)
                if batch.in_progress_s is None:  # they were never counted
                    more = await delete_lines(connection, batch.id)
                else:
                    more = await end_unfinished(connection, batch.id, why)

    async def hold(self, connection: AsyncConnection, batch_id: str, *status: BatchStatus) -> float:
        """Within a transaction: make sure that the batch is still ours and in one of these, and
        renew the lease; the time. Raises LeaseLost."""
        if self._leaving:
            raise LeaseLost
        now_s = await self._clock(connection)
        held = await connection.execute(
            update(batches)
            .where(
                batches.c.id == batch_id,
                batches.c.lease_owner == self._owner,
                batches.c.status.in_(status),
            )
            .values(lease_until_s=now_s + LEASE_S)
        )
        if held.rowcount != 1:
            raise LeaseLost
        return now_s

    async def begin(self, batch: Batch, lines: int, tokens: int, most_tokens: int | None) -> bool:
        """Its input is right: run its `lines`. False, and nothing done, if the tenant would then
        have more than `most_tokens` in line. Raises LeaseLost."""
        async with self._database.begin() as connection:
            await take_turn(connection, f"enqueued tokens of {batch.tenant}")
            now_s = await self.hold(connection, batch.id, BatchStatus.VALIDATING)
            enqueued = await enqueued_tokens(connection, batch.tenant)
            if most_tokens is not None and enqueued + tokens > most_tokens:
                return False
            await connection.execute(
                update(batches)
                .where(batches.c.id == batch.id)
                .values(
                    status=BatchStatus.IN_PROGRESS.value,
                    in_progress_s=now_s,
                    total=lines,
                    enqueued_tokens=tokens,
                    lease_owner=None,
                    lease_until_s=None,
                )
            )
        return True

    async def fail(self, batch: Batch, errors: tuple[BatchError, ...]) -> None:
        """Its input is wrong: nothing of it will be run. Raises LeaseLost."""
        async with self._database.begin() as connection:
            now_s = await self.hold(connection, batch.id, BatchStatus.VALIDATING)
            await connection.execute(
                update(batches)
                .where(batches.c.id == batch.id)
                .values(
                    status=BatchStatus.FAILED.value,
                    failed_s=now_s,
                    errors=errors_text(errors),
                    lease_owner=None,
                    lease_until_s=None,
                )
            )
        await self._delete_lines(batch.id)

    async def end(
        self,
        connection: AsyncConnection,
        batch: Batch,
        output_file: str | None,
        error_file: str | None,
    ) -> None:
        """Within a transaction that holds it: its files are written."""
        now_s = await self._clock(connection)
        status, times = BatchStatus.COMPLETED, {"completed_s": now_s}
        if batch.cancelling_s is not None:
            status, times = BatchStatus.CANCELLED, {"cancelled_s": now_s}
        elif batch.expired_s is not None:
            status, times = BatchStatus.EXPIRED, {}
        await connection.execute(
            update(batches)
            .where(batches.c.id == batch.id)
            .values(
                status=status.value,
                output_file=output_file,
                error_file=error_file,
                lease_owner=None,
                lease_until_s=None,
                **times,
            )
        )

    async def close(self) -> None:
        """Batches that no more lines are begun of: those whose lines have all ended, those that
        were not done within their window, and those whose key was revoked or has expired: a batch
        ends with the key that made it."""
        async with self._database.read() as connection:
            now_s = await self._clock(connection)
            done, late, revoked = _is_done(), _is_late(now_s), _is_revoked(now_s)
            found = [each.id for each in await _waiting(connection, or_(done, late, revoked))]
        if not found:
            return
        finalizing = {"status": BatchStatus.FINALIZING.value, "finalizing_s": now_s}
        cancelling = {"status": BatchStatus.CANCELLING.value, "cancelling_s": now_s}
        async with self._database.begin() as connection:
            for which, values in (
                (done, finalizing),
                (late, {**finalizing, "expired_s": now_s}),
                (revoked, cancelling),
            ):
                await connection.execute(
                    update(batches)
                    .where(batches.c.id.in_(found), which)
                    .values(lease_owner=None, **values)  # whoever validates it loses it
                )

    async def let_go(self) -> None:
        """Leave the batches that this gateway has leased to others."""
        async with self._database.begin() as connection:
            await connection.execute(
                update(batches)
                .where(batches.c.lease_owner == self._owner)
                .values(lease_owner=None, lease_until_s=None)
            )

    async def sweep(self, keep_s: float) -> None:
        """Forget batches that ended more than `keep_s` ago."""
        ends = (
            batches.c.completed_s,
            batches.c.failed_s,
            batches.c.expired_s,
            batches.c.cancelled_s,
        )
        async with self._database.read() as connection:
            before_s = await self._clock(connection) - keep_s
            old = and_(batches.c.status.not_in(OPEN), or_(*(end <= before_s for end in ends)))
            found = await _waiting(connection, old)
        for batch in found:
            await self._delete_lines(batch.id)
            async with self._database.begin() as connection:
                await connection.execute(delete(batches).where(batches.c.id == batch.id))

    async def _delete_lines(self, batch_id: str) -> None:
        """Of a batch that has ended."""
        more = True
        while more:
            async with self._database.begin() as connection:
                more = await delete_lines(connection, batch_id)

    async def _claim(
        self,
        connection: AsyncConnection,
        batch_id: str,
        now_s: float,
        which: ColumnElement[bool],
    ) -> Batch | None:
        row = (
            await connection.execute(
                update(batches)
                .where(batches.c.id == batch_id, which, _is_free(now_s))
                .values(lease_owner=self._owner, lease_until_s=now_s + LEASE_S)
                .returning(batches)
            )
        ).first()
        return None if row is None else batch_of(row)


async def _waiting(connection: AsyncConnection, which: ColumnElement[bool]) -> list[Waiting]:
    columns = (batches.c.id, batches.c.tenant, batches.c.key, batches.c.endpoint)
    query = select(*columns).where(which)
    rows = await connection.execute(query.order_by(batches.c.id).limit(_ASKED_AT_ONCE))
    return [Waiting(row.id, row.tenant, row.key, row.endpoint) for row in rows]


def _is_free(now_s: float) -> ColumnElement[bool]:
    return or_(batches.c.lease_owner.is_(None), batches.c.lease_until_s <= now_s)


def _can_finish(now_s: float) -> ColumnElement[bool]:
    running = exists().where(batch_lines.c.batch == batches.c.id, is_run(now_s))
    return or_(
        batches.c.status == BatchStatus.FINALIZING,
        and_(
            batches.c.status == BatchStatus.CANCELLING,
            or_(~running, batches.c.cancelling_s <= now_s - CANCEL_GRACE_S),
        ),
    )


def _is_done() -> ColumnElement[bool]:
    unfinished = exists().where(
        batch_lines.c.batch == batches.c.id, batch_lines.c.state.in_(UNFINISHED)
    )
    return and_(batches.c.status == BatchStatus.IN_PROGRESS, ~unfinished)


def _is_late(now_s: float) -> ColumnElement[bool]:
    return and_(batches.c.status.in_(_CAN_CLOSE), batches.c.expires_s <= now_s)


def _is_revoked(now_s: float) -> ColumnElement[bool]:
    gone = exists().where(
        keys.c.id == batches.c.key, or_(keys.c.revoked_s.is_not(None), keys.c.expires_s <= now_s)
    )
    return and_(batches.c.status.in_(_CAN_CLOSE), gone)


def _why_unfinished(batch: Batch) -> str:
    if batch.cancelling_s is not None:
        code, message = "batch_cancelled", "The batch was cancelled before this request was run."
    else:
        code, message = "batch_expired", "The batch's window was over before this request was run."
    return orjson.dumps({"code": code, "message": message}).decode()
