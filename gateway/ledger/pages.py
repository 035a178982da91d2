"""The ledger page by page, for whoever wants all of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import and_, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.database.schema import requests

COLUMNS = tuple(str(column.name) for column in requests.columns)
_ROWS_AT_ONCE = 250
"""Making text of them takes the event loop some milliseconds."""


class Place(NamedTuple):
    """Of a row in the ledger's order: by the time that its request was over, then by id."""

    finished_s: float
    id: str


class Page(NamedTuple):
    """Rows with the values of `COLUMNS`; `last` is None behind the last one."""

    rows: list[tuple[Any, ...]]
    last: Place | None


async def read_page(
    connection: AsyncConnection,
    start_s: float,
    end_s: float,
    tenant: str | None,
    after: Place | None,
) -> Page:
    """The next rows of requests that were over from `start_s` on and before `end_s`. A page costs
    the same wherever it lies."""
    finished_s, row_id = requests.c.finished_s, requests.c.id
    chosen = select(requests).where(finished_s >= start_s, finished_s < end_s)
    if tenant is not None:
        chosen = chosen.where(requests.c.tenant == tenant)
    if after is not None:
        behind = or_(
            finished_s > after.finished_s,
            and_(finished_s == after.finished_s, row_id > after.id),
        )
        # the first condition by itself, so that the index is entered there
        chosen = chosen.where(finished_s >= after.finished_s, behind)
    found = await connection.execute(chosen.order_by(finished_s, row_id).limit(_ROWS_AT_ONCE))
    rows = [tuple(row) for row in found]
    if len(rows) < _ROWS_AT_ONCE:
        return Page(rows, None)
    values = dict(zip(COLUMNS, rows[-1], strict=True))
    return Page(rows, Place(values["finished_s"], values["id"]))
