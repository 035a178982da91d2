"""What the database decides for gateways that do not know of each other: the time, and whose turn
it is; and how to tell that it does not answer."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import structlog
from sqlalchemy import func, select, text
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    NotSupportedError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.database.opening import DatabaseUnavailable
from gateway.errors import unavailable

_log = structlog.get_logger("forebay.batch")

Clock = Callable[[AsyncConnection], Awaitable[float]]
"""Unix seconds, for whoever uses the same database."""

_RETRY_S = 5
_OUR_MISTAKES = (DataError, IntegrityError, NotSupportedError, ProgrammingError)


async def database_time(connection: AsyncConnection) -> float:
    """The database's own time where hosts share it, since their clocks differ; of a file, this
    machine's."""
    if connection.dialect.name == "postgresql":
        moment = await connection.scalar(text("SELECT extract(epoch FROM clock_timestamp())"))
        return float(moment or 0)
    return time.time()


async def take_turn(connection: AsyncConnection, name: str) -> None:
    """Wait until nobody else has the turn of this name, and keep it until the transaction, one that
    writes, ends. Must be its first statement: what is read before it may be old."""
    if connection.dialect.name == "postgresql":
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        number = int.from_bytes(digest, signed=True)
        await connection.execute(select(func.pg_advisory_xact_lock(number)))
    # in SQLite one transaction writes at a time, so that it is always this one's turn


def is_away(error: BaseException) -> bool:
    """Whether this says that the database does not answer, rather than that we are wrong."""
    if isinstance(error, DBAPIError):
        return not isinstance(error, _OUR_MISTAKES)
    return isinstance(error, DatabaseUnavailable | PoolTimeout | OSError)


@contextmanager
def database_answers() -> Iterator[None]:
    """Around what a client waits for: a 503 ApiError if the database does not answer."""
    try:
        yield
    except Exception as error:
        if not is_away(error):
            raise
        # the kind of error only: its text may repeat what was sent
        _log.warning("the database does not answer", error=type(error).__name__)
        raise unavailable(
            "The database does not answer.", code="database_unavailable", retry_after_s=_RETRY_S
        ) from error
