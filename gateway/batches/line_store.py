"""A batch's lines, in the database, and who is running which.

A line that is `running` belongs to the gateway that holds its lease; when the lease has run out,
whoever comes next may run it again. A result counts only from who still holds it, so that there is
one. For a line that is `pending`, `lease_until_s` is when it may be tried (again) at the earliest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, delete, exists, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batches.batch import BatchStatus
from gateway.batches.turns import Clock
from gateway.database.opening import Transactions
from gateway.database.schema import batch_lines, batches

_AT_ONCE = 5000
"""Lines that one transaction changes: it must not keep others waiting."""

LEASE_S = 30.0
"""How long a gateway may be silent before others take its lines."""


class LineState(StrEnum):
    """`FAILED` is a line that got an error for an answer, or was not run at all."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


UNFINISHED = (LineState.PENDING, LineState.RUNNING)


class LineKey(NamedTuple):
    """Which line of which batch, from 1."""

    batch: str
    number: int


class NewLine(NamedTuple):
    """A line that has been validated. `tokens` is the most that it may use, `body` JSON."""

    number: int
    custom_id: str
    body: str
    tokens: int


class TakenLine(NamedTuple):
    """A line to be run."""

    key: LineKey
    body: str


class Result(NamedTuple):
    """What became of a line, each as JSON: the answer, or why there is none."""

    state: LineState
    response: str | None
    error: str | None


class EndedLine(NamedTuple):
    """A line with what became of it."""

    number: int
    custom_id: str
    result: Result


class LineStore:
    """Lines of every batch. `owner` names this gateway among those that share the database.
    Whatever is asked of it may raise SQLAlchemyError and OSError while the database is away."""

    def __init__(self, database: Transactions, clock: Clock, owner: str) -> None:
        self._database = database
        self._clock = clock
        self._owner = owner

    async def take(self, batch_id: str, most: int) -> list[TakenLine]:
        """Up to `most` lines to be run, leased to this gateway: such as nobody has tried yet, then
        such as whoever ran them has lost."""
        async with self._database.begin() as connection:
            now_s = await self._clock(connection)
            taken = await self._take(connection, batch_id, most, now_s, may_be_tried(now_s))
            if len(taken) < most:
                rest = most - len(taken)
                taken += await self._take(connection, batch_id, rest, now_s, _is_lost(now_s))
        return taken

    async def _take(
        self,
        connection: AsyncConnection,
        batch_id: str,
        most: int,
        now_s: float,
        which: ColumnElement[bool],
    ) -> list[TakenLine]:
        # in a common table expression, which runs once; a subquery with a lock might run again
        picked = (
            select(batch_lines.c.line)
            .where(batch_lines.c.batch == batch_id, which, _runs(batch_id))
            .limit(most)
            .with_for_update(skip_locked=True)
            .cte("picked")
        )
        rows = await connection.execute(
            update(batch_lines)
            .where(batch_lines.c.batch == batch_id, batch_lines.c.line.in_(select(picked.c.line)))
            .values(
                state=LineState.RUNNING.value,
                lease_owner=self._owner,
                lease_until_s=now_s + LEASE_S,
            )
            .returning(batch_lines.c.line, batch_lines.c.body)
        )
        return [TakenLine(LineKey(batch_id, row.line), row.body) for row in rows]

    async def renew(self, keys: Iterable[LineKey]) -> set[LineKey]:
        """Hold on to these; those that still are this gateway's."""
        numbers: dict[str, list[int]] = defaultdict(list)
        for key in keys:
            numbers[key.batch].append(key.number)
        held: set[LineKey] = set()
        async with self._database.begin() as connection:
            now_s = await self._clock(connection)
            for batch_id in sorted(numbers):  # in one order, so that nobody waits in a circle
                rows = await connection.execute(
                    update(batch_lines)
                    .where(self._is_held(batch_id, numbers[batch_id]))
                    .values(lease_until_s=now_s + LEASE_S)
                    .returning(batch_lines.c.line)
                )
                held.update(LineKey(batch_id, row.line) for row in rows)
        return held

    async def finish(self, key: LineKey, result: Result) -> bool:
        """Write down what became of it; False if it is not this gateway's any more."""
        async with self._database.begin() as connection:
            written = await connection.execute(
                update(batch_lines)
                .where(self._is_held(key.batch, [key.number]))
                .values(
                    state=result.state.value,
                    response=result.response,
                    error=result.error,
                    body="",
                    lease_owner=None,
                    lease_until_s=None,
                )
            )
        return written.rowcount == 1

    async def put_back(self, key: LineKey, wait_s: float) -> None:
        """It may be tried again after `wait_s`, by whomever."""
        async with self._database.begin() as connection:
            now_s = await self._clock(connection)
            await connection.execute(
                update(batch_lines)
                .where(self._is_held(key.batch, [key.number]))
                .values(
                    state=LineState.PENDING.value, lease_owner=None, lease_until_s=now_s + wait_s
                )
            )

    async def let_go(self) -> int:
        """Leave all that this gateway holds to others; how many lines that were."""
        async with self._database.begin() as connection:
            left = await connection.execute(
                update(batch_lines)
                .where(
                    batch_lines.c.lease_owner == self._owner,
                    batch_lines.c.state == LineState.RUNNING,
                )
                .values(state=LineState.PENDING.value, lease_owner=None, lease_until_s=None)
            )
        return left.rowcount

    async def ended(self, batch_id: str, after: int, limit: int) -> list[EndedLine]:
        """Some of the lines behind line `after`, of a batch of which all have ended."""
        async with self._database.read() as connection:
            rows = await connection.execute(
                select(batch_lines)
                .where(batch_lines.c.batch == batch_id, batch_lines.c.line > after)
                .order_by(batch_lines.c.line)
                .limit(limit)
            )
            return [
                EndedLine(
                    row.line,
                    row.custom_id,
                    Result(LineState(row.state), row.response, row.error),
                )
                for row in rows
            ]

    async def forget_results(self, batch_id: str, first: int, last: int) -> None:
        """Those of the lines from `first` to `last`, which are in the batch's files by now."""
        async with self._database.begin() as connection:
            await connection.execute(
                update(batch_lines)
                .where(
                    batch_lines.c.batch == batch_id,
                    batch_lines.c.line.between(first, last),
                )
                .values(response=None, error=None)
            )

    def _is_held(self, batch_id: str, numbers: Sequence[int]) -> ColumnElement[bool]:
        return and_(
            batch_lines.c.batch == batch_id,
            batch_lines.c.line.in_(numbers),
            batch_lines.c.state == LineState.RUNNING,
            batch_lines.c.lease_owner == self._owner,
        )


async def add_lines(connection: AsyncConnection, batch_id: str, lines: Iterable[NewLine]) -> None:
    """Lines of a batch that is being validated."""
    rows = [
        {
            "batch": batch_id,
            "line": line.number,
            "custom_id": line.custom_id,
            "state": LineState.PENDING.value,
            "tokens": line.tokens,
            "body": line.body,
        }
        for line in lines
    ]
    if rows:
        await connection.execute(insert(batch_lines), rows)


async def end_unfinished(connection: AsyncConnection, batch_id: str, error: str) -> bool:
    """Some of the lines that have not ended will not be run; `error` is JSON. Whether there may be
    more."""
    ended = await connection.execute(
        update(batch_lines)
        .where(*_some(batch_id, batch_lines.c.state.in_(UNFINISHED)))
        .values(
            state=LineState.FAILED.value,
            error=error,
            body="",
            lease_owner=None,
            lease_until_s=None,
        )
    )
    return ended.rowcount > 0


async def delete_lines(connection: AsyncConnection, batch_id: str) -> bool:
    """Some of a batch's lines. Whether there may be more."""
    deleted = await connection.execute(delete(batch_lines).where(*_some(batch_id)))
    return deleted.rowcount > 0


async def enqueued_tokens(connection: AsyncConnection, tenant: str) -> int:
    """The most that the tenant's lines which have not ended may use."""
    total = await connection.scalar(
        select(func.coalesce(func.sum(batch_lines.c.tokens), 0))
        .select_from(batch_lines.join(batches, batches.c.id == batch_lines.c.batch))
        .where(
            batches.c.tenant == tenant,
            batches.c.status == BatchStatus.IN_PROGRESS,
            batch_lines.c.state.in_(UNFINISHED),
        )
    )
    return int(total or 0)


def may_be_tried(now_s: float) -> ColumnElement[bool]:
    """Of a line that nobody runs."""
    return and_(
        batch_lines.c.state == LineState.PENDING,
        or_(batch_lines.c.lease_until_s.is_(None), batch_lines.c.lease_until_s <= now_s),
    )


def is_run(now_s: float) -> ColumnElement[bool]:
    """Of a line that a living gateway runs."""
    return and_(batch_lines.c.state == LineState.RUNNING, batch_lines.c.lease_until_s > now_s)


def may_be_taken(now_s: float) -> ColumnElement[bool]:
    """Of a line that a gateway may run."""
    return or_(may_be_tried(now_s), _is_lost(now_s))


def _is_lost(now_s: float) -> ColumnElement[bool]:
    return and_(batch_lines.c.state == LineState.RUNNING, batch_lines.c.lease_until_s <= now_s)


def _runs(batch_id: str) -> ColumnElement[bool]:
    return exists().where(batches.c.id == batch_id, batches.c.status == BatchStatus.IN_PROGRESS)


def _some(batch_id: str, *which: ColumnElement[bool]) -> Sequence[ColumnElement[bool]]:
    some = select(batch_lines.c.line).where(batch_lines.c.batch == batch_id, *which).limit(_AT_ONCE)
    return (batch_lines.c.batch == batch_id, batch_lines.c.line.in_(some), *which)
