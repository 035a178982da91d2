"""Opens the database that the settings name, with its tables as this version knows them."""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import asyncpg
from sqlalchemy import URL, Connection, ExceptionContext, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from gateway.database.address import EMBEDDED, database_secrets, shown_database
from gateway.database.migrations import LaterSchemaError, UnknownSchemaError, bring_up_to_date
from gateway.database.schema import VERSION
from gateway.settings_errors import ConfigError
from gateway.settings_tenants import DatabaseSettings
from gateway.state_dir import StateDir

_FILE = "forebay.sqlite"
_CONNECT_S = 5.0
_STATEMENT_S = 10.0
_MIGRATION_S = 600.0
_LOCKED_S = 5.0
"""For another process's transaction on the SQLite file to end."""
_POOL = 5
_MORE_AT_MOST = 5
_POOL_S = 5.0
_IDLE_MS = 60_000
_READ_ONLY = "25006"
"""SQLSTATE of what a standby says to a transaction that writes."""
_READS = "forebay_reads"
_DURABLE = "forebay_durable"


class DatabaseUnavailable(SQLAlchemyError):
    """There is no connection to be had. The message is without secrets."""


class Transactions(Protocol):
    """What those need who keep something in the database."""

    def begin(self, *, durable: bool = False) -> AbstractAsyncContextManager[AsyncConnection]:
        """See `Database.begin`."""
        ...

    def read(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """See `Database.read`."""
        ...


@dataclass(frozen=True, slots=True)
class Database:
    """An open database. `shared` is whether gateways on other hosts may use it too."""

    engine: AsyncEngine
    shared: bool

    def begin(self, *, durable: bool = False) -> AbstractAsyncContextManager[AsyncConnection]:
        """A transaction that writes: committed at the end of its scope, rolled back if that fails.
        Raises sqlalchemy.exc.SQLAlchemyError, at the latest after some seconds.

        In SQLite there is one at a time, of all processes, so its scope should be short. What it
        commits survives the end of the process in any case; a loss of power may take back the last
        moments there unless it is `durable`, which waits for the disk.
        """
        engine = self.engine.execution_options(**{_DURABLE: True}) if durable else self.engine
        return _transaction(engine)

    def read(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A transaction that only reads, of one state of the database, and holds nobody up. Raises
        sqlalchemy.exc.SQLAlchemyError, at the latest after some seconds."""
        if self.shared:
            options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        else:
            options = {_READS: True}
        return _transaction(self.engine.execution_options(**options))


@asynccontextmanager
async def _transaction(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    async with AsyncExitStack() as held:
        try:
            connection = await held.enter_async_context(engine.begin())
        except OSError as error:  # what the pool lets through while it looks for a connection
            raise DatabaseUnavailable(_reason(error)) from None
        yield connection


class LateDatabase:
    """Stands for a database that is still being opened."""

    def __init__(self) -> None:
        self._database: Database | None = None

    def use(self, database: Database) -> None:
        """It is open."""
        self._database = database

    def begin(self, *, durable: bool = False) -> AbstractAsyncContextManager[AsyncConnection]:
        """See `Database.begin`."""
        return self._open().begin(durable=durable)

    def read(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """See `Database.read`."""
        return self._open().read()

    def _open(self) -> Database:
        if self._database is None:
            raise DatabaseUnavailable("no database is open")
        return self._database


@asynccontextmanager
async def open_database(
    settings: DatabaseSettings, environ: Mapping[str, str]
) -> AsyncIterator[Database]:
    """Connect, and make or upgrade the tables.

    Raises ConfigError, without the URL's password, if the database cannot be reached, refuses us,
    or was written by a later version.
    """
    shared = settings.url != EMBEDDED
    if shared:
        await _prepare(_postgres(settings.url, _MIGRATION_S), settings.url)
        engine = _postgres(settings.url, _STATEMENT_S)
    else:
        path = StateDir.open(environ).path / _FILE
        await asyncio.to_thread(_prepare_file, path)
        await _prepare(_sqlite(path), str(path))
        engine = _sqlite(path)
    try:
        yield Database(engine, shared)
    finally:
        await engine.dispose()


async def _prepare(engine: AsyncEngine, url: str) -> None:
    """Bring the tables up to date, by connections of their own: it may take long."""
    shown = shown_database(url)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(bring_up_to_date)
    except LaterSchemaError as later:
        raise ConfigError(
            [
                f"database.url: {shown} was written by a later forebay (its schema is version "
                f"{later.found}, this one's {VERSION}): run that version again, or name another "
                "database"
            ]
        ) from None
    except UnknownSchemaError as error:
        raise ConfigError(
            [f"database.url: {shown} cannot be used ({error}): put a backup in its place"]
        ) from None
    except SQLAlchemyError as error:
        reason = _without_secrets(_reason(error), url)
        advice = "make it reachable for this user, or name another"
        if engine.dialect.name == "sqlite":
            advice = _file_advice(getattr(error, "orig", None))
        raise ConfigError([f"database.url: {shown} cannot be used ({reason}): {advice}"]) from None
    finally:
        await engine.dispose()


def _postgres(url: str, statement_s: float) -> AsyncEngine:
    async def connect() -> Any:
        # the driver reads the URL itself, and so knows sslmode, several hosts and all the rest
        try:
            return await asyncpg.connect(
                url,
                timeout=_CONNECT_S,
                command_timeout=statement_s,
                server_settings={
                    "application_name": "forebay",
                    "idle_in_transaction_session_timeout": str(_IDLE_MS),
                    "jit": "off",
                },
            )
        except (asyncpg.InterfaceError, ValueError, TypeError, OverflowError):
            # whatever it says against a URL may quote it
            raise DatabaseUnavailable("is not a PostgreSQL URL that can be used") from None
        except (OSError, asyncpg.PostgresError) as error:
            raise DatabaseUnavailable(_without_secrets(_reason(error), url)) from None

    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=connect,
        pool_size=_POOL,
        max_overflow=_MORE_AT_MOST,
        pool_timeout=_POOL_S,
        pool_pre_ping=True,
    )
    event.listen(engine.sync_engine, "handle_error", _connection_is_gone)
    return engine


def _connection_is_gone(context: ExceptionContext) -> DatabaseUnavailable | None:
    """The driver's own name for what is no answer of the server's; such a connection is not used
    again. Nor is one to a server that takes no writes any more: behind its name there may be
    another one by now, which has taken over."""
    error = context.original_exception
    if getattr(error, "sqlstate", None) == _READ_ONLY and not _only_reads(context.connection):
        context.is_disconnect = True
    if not isinstance(error, OSError):  # a TimeoutError too
        return None
    context.is_disconnect = True
    return DatabaseUnavailable(_reason(error))


def _only_reads(connection: Connection | None) -> bool:
    return connection is not None and "postgresql_readonly" in connection.get_execution_options()


def _sqlite(path: Path) -> AsyncEngine:
    engine = create_async_engine(
        URL.create("sqlite+aiosqlite", database=str(path)),
        # no transactions that the driver begins as it sees fit
        connect_args={"timeout": _LOCKED_S, "isolation_level": None},
        pool_size=_POOL,
        max_overflow=_MORE_AT_MOST,
        pool_timeout=_POOL_S,
    )
    event.listen(engine.sync_engine, "begin", _begin)
    event.listen(engine.sync_engine, "invalidate", _give_up)
    return engine


def _give_up(connection: Any, _record: object, _error: object) -> None:
    """One whose task was cancelled in the middle of a statement is thrown away, but not closed
    before the statement's result is: it would hold the lock until then."""
    connection.rollback()


def _begin(connection: Connection) -> None:
    """A transaction that writes takes the lock at once: one that began by reading could not wait
    for it later, as others may have written since."""
    options = connection.get_execution_options()
    level = "FULL" if options.get(_DURABLE) else "NORMAL"
    connection.exec_driver_sql(f"PRAGMA synchronous = {level}")
    connection.exec_driver_sql("BEGIN" if options.get(_READS) else "BEGIN IMMEDIATE")


def _prepare_file(path: Path) -> None:
    """Make the file, for its owner alone, with a log beside it so that readers and a writer do not
    wait for each other. Raises ConfigError."""
    try:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            path.chmod(0o600)  # not opened: closing it again would drop this process's own locks
        with closing(sqlite3.connect(path, timeout=_LOCKED_S)) as connection:
            _use_log(connection)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be made or used ({error.strerror})"]) from None
    except sqlite3.Error as error:
        raise ConfigError([f"{path}: cannot be used ({error}): {_file_advice(error)}"]) from None


def _file_advice(error: BaseException | None) -> str:
    """What to do about a file that SQLite cannot use. Only one that is damaged is to be given up:
    who moves away a whole one, as the disk is full, loses every tenant and key."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest says more of the same
    match code:
        case sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CORRUPT:
            return "put a backup in its place, or move it away to begin with a new one"
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return "another process holds it; end that"
        case sqlite3.SQLITE_FULL | sqlite3.SQLITE_IOERR:
            return "look whether its disk is full or broken"
        case _:
            return "see that it is a file which this user may write, in such a directory"


def _use_log(connection: sqlite3.Connection) -> None:
    # of two that do this at once one is refused without having waited
    deadline = time.monotonic() + _LOCKED_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def kind_of(error: Exception) -> str:
    """What kind of error it is, for a log, without its text, which holds statements and values:
    the database's own word for it where there is one, such as SQLITE_FULL or SQLSTATE 53100."""
    cause = getattr(error, "orig", None)
    if name := getattr(cause, "sqlite_errorname", None):
        return str(name)
    if state := getattr(cause, "sqlstate", None):
        return f"SQLSTATE {state}"
    return type(error).__name__


def _reason(error: Exception) -> str:
    """Half a sentence."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    match cause:
        case TimeoutError():
            return "it does not answer in time"
        case socket.gaierror():
            return "its host's name is not known"
        case ConnectionRefusedError():
            return "nothing listens there"
        case ssl.SSLError():
            return f"no TLS: {cause.reason or 'refused'}"
        case OSError():
            return cause.strerror or type(cause).__name__
        case _:
            return " ".join(str(cause).split()) or type(cause).__name__


def _without_secrets(text: str, url: str) -> str:
    for secret in database_secrets(url):
        text = text.replace(secret, "***")
    return text
