"""The audit trail: what operators did, in a table that only grows."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
import structlog
from sqlalchemy import Row, Select, insert, or_, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.database.opening import Transactions
from gateway.database.schema import audit

_log = structlog.get_logger("forebay.audit")

Outcome = Literal["success", "refused", "failed"]
"""`refused`: the request was wrong, and nothing was done; `failed`: not done, or not all of it."""

_LONGEST_DETAIL = 8_192


@dataclass(slots=True)
class Deed:
    """One action of an operator while it is done. Who does it may say more exactly what its
    `target` is, and add to `detail`: never a secret.

    `written` is whether its row is in the table, which a change of the registry sees to itself,
    so that there is none without the other.
    """

    actor: str
    action: str
    target: str
    client: str = ""
    request_id: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    written: bool = False


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which rows are wanted: all that is given must hold. `action` may be the beginning of one, up
    to a dot ("key" is all that is done to keys); times are Unix seconds, `until_s` excluded;
    `before` is the id of the last row that was seen."""

    action: str | None = None
    target: str | None = None
    actor: str | None = None
    since_s: float | None = None
    until_s: float | None = None
    before: int | None = None


class AuditTrail:
    """Writes what is done, and finds it again."""

    def __init__(self, database: Transactions) -> None:
        self._database = database
        self.lost = 0
        """Rows that could not be written; each is in the log."""

    async def note(self, deed: Deed, outcome: Outcome) -> None:
        """Write the deed's row if it is not there yet. Never raises: what was done was done, and
        where the table cannot say so, the log does."""
        if deed.written:
            return
        try:
            async with self._database.begin(durable=True) as connection:
                await write_deed(connection, deed, outcome)
            deed.written = True
        except SQLAlchemyError as error:
            self.lost += 1
            _log.error(
                "audit row lost: the database cannot be used",
                reason=type(error).__name__,
                actor=deed.actor,
                action=deed.action,
                target=deed.target,
                detail=deed.detail,
                client=deed.client,
                outcome=outcome,
            )

    async def page(self, wanted: AuditFilter, limit: int) -> list[dict[str, Any]]:
        """Rows as JSON values, the newest first. Raises SQLAlchemyError."""
        async with self._database.read() as connection:
            rows = await connection.execute(_query(wanted).limit(limit))
            return [_as_json(row) for row in rows]


async def write_deed(connection: AsyncConnection, deed: Deed, outcome: Outcome) -> None:
    """Add the deed's row within the connection's transaction."""
    detail = orjson.dumps(deed.detail, default=str).decode()
    await connection.execute(
        insert(audit).values(
            at_s=time.time(),
            actor=_stored(deed.actor, 64),
            action=_stored(deed.action, 64),
            target=_stored(deed.target, 256),
            detail=detail if len(detail) <= _LONGEST_DETAIL else '{"too_long":true}',
            client=_stored(deed.client, 64),
            request_id=_stored(deed.request_id, 128),
            outcome=outcome,
        )
    )


def _stored(text: str, longest: int) -> str:
    """A text that fits its column: paths may hold what no database takes."""
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()[:longest]


def _query(wanted: AuditFilter) -> Select[Any]:
    query = select(audit).order_by(audit.c.id.desc())
    if wanted.action is not None:
        below = audit.c.action.startswith(wanted.action + ".", autoescape=True)
        query = query.where(or_(audit.c.action == wanted.action, below))
    if wanted.target is not None:
        query = query.where(audit.c.target == wanted.target)
    if wanted.actor is not None:
        query = query.where(audit.c.actor == wanted.actor)
    if wanted.since_s is not None:
        query = query.where(audit.c.at_s >= wanted.since_s)
    if wanted.until_s is not None:
        query = query.where(audit.c.at_s < wanted.until_s)
    if wanted.before is not None:
        query = query.where(audit.c.id < wanted.before)
    return query


def _as_json(row: Row[Any]) -> dict[str, Any]:
    fields = row._mapping
    return {
        "id": fields["id"],
        "at": fields["at_s"],
        "actor": fields["actor"],
        "action": fields["action"],
        "target": fields["target"],
        "detail": orjson.loads(fields["detail"]),
        "client": fields["client"],
        "request_id": fields["request_id"],
        "outcome": fields["outcome"],
    }
