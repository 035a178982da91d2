"""Opening a database of either kind, and what happens when it is not there."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from sqlalchemy import insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, SQLAlchemyError

from gateway.database.address import database_secrets, shown_database
from gateway.database.opening import (
    Database,
    DatabaseUnavailable,
    LateDatabase,
    kind_of,
    open_database,
)
from gateway.database.schema import VERSION, meta, tenants
from gateway.ledger.table import LedgerUnavailable, asked
from gateway.settings_errors import ConfigError
from gateway.settings_tenants import DatabaseSettings
from tests.gateway.database.both import KINDS, Place, place
from tests.postgres import PASSWORD, Postgres

_HOLD = """
import sqlite3, sys
held = sqlite3.connect(sys.argv[1], isolation_level=None)
held.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=KINDS)
def somewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place(request.param, tmp_path, request)


def row(name: str) -> dict[str, object]:
    return {"id": name, "settings": "{}", "created_s": 1.0, "updated_s": 1.0}


async def add_two(database: Database, first: str, second: str) -> None:
    async with database.begin() as connection:
        await connection.execute(insert(tenants).values(row(first)))
        await connection.execute(insert(tenants).values(row(second)))


async def test_what_is_committed_is_there_for_the_next_one(somewhere: Place) -> None:
    async with somewhere.open() as database:
        async with database.begin(durable=True) as connection:
            await connection.execute(insert(tenants).values(row("acme")))
        with pytest.raises(IntegrityError):
            await add_two(database, "beta", "acme")
    async with somewhere.open() as database, database.read() as connection:
        found = await connection.execute(select(tenants.c.id))
        assert [each.id for each in found] == ["acme"]
        versions = dict(tuple(each) for each in await connection.execute(select(meta)))
    assert versions == {"schema_version": str(VERSION), "registry_version": "0"}
    assert database.shared == (somewhere.url != "sqlite")


async def test_reading_sees_one_state_and_holds_nobody_up(somewhere: Place) -> None:
    async with somewhere.open() as database, somewhere.open() as other:
        async with database.read() as reading:
            assert (await reading.execute(select(tenants))).all() == []
            async with other.begin() as connection:
                await connection.execute(insert(tenants).values(row("acme")))
            assert (await reading.execute(select(tenants))).all() == []
            with pytest.raises(SQLAlchemyError):
                await reading.execute(insert(tenants).values(row("acme")))
        async with database.read() as reading:
            assert len((await reading.execute(select(tenants))).all()) == 1


async def test_writers_wait_for_each_other(somewhere: Place) -> None:
    """Reading what is then written would be lost to somebody else's write in between."""
    lock = update(meta).where(meta.c.key == "registry_version").values(value=meta.c.value)

    async def count_up() -> None:
        for _ in range(5):
            async with database.begin() as connection:
                await connection.execute(lock)
                value = await connection.scalar(
                    select(meta.c.value).where(meta.c.key == "registry_version")
                )
                await connection.execute(
                    update(meta)
                    .where(meta.c.key == "registry_version")
                    .values(value=str(int(value or "") + 1))
                )

    async with somewhere.open() as database:
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(count_up())
        async with database.read() as connection:
            found = await connection.scalar(
                select(meta.c.value).where(meta.c.key == "registry_version")
            )
    assert found == "20"


async def ask(database: Database, question: str) -> None:
    async with database.read() as connection:
        await connection.execute(text(question))


async def test_a_request_that_is_given_up_leaves_the_pool_whole(somewhere: Place) -> None:
    slow = (
        "SELECT pg_sleep(5)"
        if somewhere.url != "sqlite"
        else "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 300000) "
        "SELECT max(i) FROM n"
    )
    async with somewhere.open() as database:
        for _ in range(12):  # more than the pool has
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await ask(database, slow)
        async with database.read() as connection:
            assert await connection.scalar(text("SELECT 1")) == 1


async def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    os.umask(umask := os.umask(0o000))
    state = tmp_path / "state"
    state.mkdir(0o755)
    somewhere = Place("sqlite", {"FOREBAY_STATE_DIR": str(state)})
    async with somewhere.open() as database, database.begin() as connection:
        await connection.execute(insert(tenants).values(row("acme")))
        modes = {path.name: path.stat().st_mode & 0o777 for path in state.iterdir()}
    assert modes == dict.fromkeys(
        ("forebay.sqlite", "forebay.sqlite-wal", "forebay.sqlite-shm"), 0o600
    )
    assert os.umask(umask) == umask


async def test_a_file_that_another_process_holds_is_an_error_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.database.opening._LOCKED_S", 0.2)
    somewhere = Place("sqlite", {"FOREBAY_STATE_DIR": str(tmp_path / "state")})
    async with somewhere.open() as database:
        path = tmp_path / "state" / "forebay.sqlite"
        holder = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _HOLD, str(path)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None
        assert holder.stdin is not None
        try:
            await holder.stdout.readline()
            with pytest.raises(SQLAlchemyError, match="locked"):
                async with database.begin():
                    pass
            async with database.read() as connection:  # which waits for nobody
                assert (await connection.execute(select(tenants))).all() == []
        finally:
            holder.stdin.close()
            await holder.wait()
        async with database.begin() as connection:
            await connection.execute(insert(tenants).values(row("acme")))


async def test_a_file_that_is_none_of_ours(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(0o700)
    (state / "forebay.sqlite").write_bytes(b"this is not a database at all, but a text" * 50)
    with pytest.raises(ConfigError, match="file is not a database"):
        async with Place("sqlite", {"FOREBAY_STATE_DIR": str(state)}).open():
            pass


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (sqlite3.SQLITE_NOTADB, "put a backup in its place, or move it away"),
        (sqlite3.SQLITE_FULL, "look whether its disk is full"),
        (sqlite3.SQLITE_IOERR_WRITE, "look whether its disk is full"),
        (sqlite3.SQLITE_BUSY, "another process holds it"),
        (sqlite3.SQLITE_CANTOPEN, "see that it is a file which this user may write"),
    ],
)
async def test_only_a_damaged_file_is_to_be_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, advice: str
) -> None:
    error = sqlite3.OperationalError("for a reason")
    error.sqlite_errorcode = code
    stages = {"_use_log": error, "bring_up_to_date": OperationalError("SELECT 1", {}, error)}
    somewhere = Place("sqlite", {"FOREBAY_STATE_DIR": str(tmp_path / "state")})
    for stage, failure in stages.items():
        with monkeypatch.context() as patched:
            failing = Mock(side_effect=failure)
            patched.setattr(f"gateway.database.opening.{stage}", failing)
            with pytest.raises(ConfigError) as caught:
                async with somewhere.open():
                    pass
        [line] = caught.value.messages
        assert f"(for a reason): {advice}" in line


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("UPDATE meta SET value = 'x' WHERE key = 'schema_version'", "version is no number"),
        ("UPDATE meta SET value = '0' WHERE key = 'schema_version'", "version 0, which is not"),
        ("DELETE FROM meta", "schema's version is missing"),
        ("DROP TABLE requests", "it lacks the table requests"),
    ],
)
async def test_tables_that_are_none_of_ours(somewhere: Place, damage: str, reason: str) -> None:
    async with somewhere.open() as database, database.begin() as connection:
        await connection.execute(text(damage))
    with pytest.raises(ConfigError) as caught:
        async with somewhere.open():
            pass
    [line] = caught.value.messages
    assert reason in line
    assert line.endswith("put a backup in its place")


async def test_opened_by_many_at_once(somewhere: Place) -> None:
    async def once() -> None:
        async with somewhere.open() as database, database.begin() as connection:
            await connection.execute(select(tenants))

    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(once())


@pytest.mark.parametrize("version", [str(VERSION + 1), "999"])
async def test_a_later_schema_is_refused_in_one_line(somewhere: Place, version: str) -> None:
    async with somewhere.open() as database, database.begin() as connection:
        await connection.execute(
            update(meta).where(meta.c.key == "schema_version").values(value=version)
        )
    with pytest.raises(ConfigError) as caught:
        async with somewhere.open():
            pass
    [line] = caught.value.messages
    assert f"its schema is version {version}, this one's {VERSION}" in line
    assert "run that version again, or name another database" in line
    assert PASSWORD not in line
    assert database_secrets(somewhere.url).isdisjoint(line.split())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("pass-of-postgres", "wrong-password"), "password authentication failed"),
        (("/test_", "/missing_"), 'database "missing_'),
        (("127.0.0.1:", "127.0.0.1:9"), "is not a PostgreSQL URL that can be used"),
        (("127.0.0.1:", "127.0.0.9:"), "nothing listens there"),
        (("127.0.0.1:", "no.such.host.invalid:"), "its host's name is not known"),
        (("/test_", "/x?sslmode=verify-full&sslrootcert=/none/"), "cannot be used"),
        (("127.0.0.1:", "127.0.0.1:x"), "is not a PostgreSQL URL that can be used"),
    ],
)
async def test_a_server_that_cannot_be_used_is_named_without_its_password(
    postgres_url: str, change: tuple[str, str], reason: str
) -> None:
    url = postgres_url.replace(*change)
    with pytest.raises(ConfigError) as caught:
        async with open_database(DatabaseSettings(url=url), {}):
            pass
    [line] = caught.value.messages
    assert line.startswith("database.url: postgresql://postgres:***@")
    assert reason in line
    assert caught.value.__cause__ is None
    for secret in (*database_secrets(url), "pass-of", "wrong-password"):
        assert secret not in line


async def test_a_server_that_goes_and_comes_back(
    postgres: Postgres, postgres_url: str, tmp_path: Path
) -> None:
    async with Place(postgres_url, {}).open() as database:
        async with database.read() as connection:
            await connection.execute(select(tenants))
        postgres.stop()
        try:
            began = time.monotonic()
            with pytest.raises(DatabaseUnavailable, match="nothing listens there"):
                async with database.read():
                    pass
            assert time.monotonic() - began < 1
        finally:
            postgres.start()
        async with database.begin() as connection:
            await connection.execute(insert(tenants).values(row("acme")))


async def test_a_server_that_says_nothing_holds_nobody_up_for_long(
    postgres: Postgres, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.database.opening._STATEMENT_S", 0.3)
    monkeypatch.setattr("gateway.database.opening._CONNECT_S", 0.3)
    async with Place(postgres_url, {}).open() as database:
        async with database.read() as connection:
            # a backend of its own, which does not hear of a stop of the server's first process
            backend = int(await connection.scalar(text("SELECT pg_backend_pid()")) or 0)
        postgres.signal(signal.SIGSTOP)
        os.kill(backend, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(DatabaseUnavailable, match="does not answer in time"):
                async with database.read() as connection:
                    await connection.execute(select(tenants))
            assert time.monotonic() - began < 3
        finally:
            os.kill(backend, signal.SIGCONT)
            postgres.signal(signal.SIGCONT)
        async with database.read() as connection:
            assert (await connection.execute(select(tenants))).all() == []


async def test_a_statement_that_takes_too_long_is_given_up(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.database.opening._STATEMENT_S", 0.2)
    async with Place(postgres_url, {}).open() as database:
        with pytest.raises(DatabaseUnavailable, match="does not answer in time"):
            await ask(database, "SELECT pg_sleep(5)")
        async with database.read() as connection:
            assert await connection.scalar(text("SELECT 1")) == 1


async def test_a_connection_that_breaks_in_the_middle(
    postgres: Postgres, postgres_url: str
) -> None:
    async with Place(postgres_url, {}).open() as database:
        with pytest.raises(SQLAlchemyError):
            await break_off(database, postgres)
        async with database.read() as connection:
            assert (await connection.execute(select(tenants))).all() == []


async def test_a_server_that_takes_no_writes_any_more_is_left(
    postgres: Postgres, postgres_url: str
) -> None:
    name = postgres_url.rpartition("/")[2]
    setting = f"ALTER DATABASE {name} SET default_transaction_read_only"
    async with Place(postgres_url, {}).open() as database:
        # of connections that are made from now on: those to a primary that has become a standby
        postgres.execute(f"{setting} = on")
        async with AsyncExitStack() as held:
            for _ in range(2):
                connection = await held.enter_async_context(database.engine.connect())
                await connection.execute(text("SELECT 1"))
        postgres.execute(f"{setting} = off")  # and behind the name there is another one
        with pytest.raises(DBAPIError):
            await write(database)
        for _ in range(2):
            await write(database)


async def write(database: Database) -> None:
    async with database.begin() as connection:
        await connection.execute(text("CREATE TABLE IF NOT EXISTS written (what integer)"))


async def break_off(database: Database, postgres: Postgres) -> None:
    async with database.begin() as connection:
        backend = await connection.scalar(text("SELECT pg_backend_pid()"))
        postgres.execute(f"SELECT pg_terminate_backend({backend})")
        await connection.execute(insert(tenants).values(row("acme")))


async def test_before_it_is_open() -> None:
    late = LateDatabase()
    for scope in (late.begin, late.read):
        with pytest.raises(DatabaseUnavailable, match="no database is open"):
            scope()


async def test_an_aborted_process_leaves_a_usable_file(tmp_path: Path) -> None:
    somewhere = Place("sqlite", {"FOREBAY_STATE_DIR": str(tmp_path / "state")})
    async with somewhere.open():
        path = tmp_path / "state" / "forebay.sqlite"
    with closing(sqlite3.connect(path)) as plain:
        assert plain.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize(
    ("url", "shown", "secrets"),
    [
        ("postgresql://h/db", "postgresql://h/db", set()),
        ("postgresql://me@h/db", "postgresql://***@h/db", set()),
        ("postgresql://me:p%2Fw@h:1/db", "postgresql://me:***@h:1/db", {"p%2Fw", "p/w"}),
        ("postgresql://me:p@w@h/db", "postgresql://me:***@h/db", {"p@w"}),
        ("postgresql://me:pw@h:1,g:2/db", "postgresql://me:***@h:1,g:2/db", {"pw"}),
        (
            "postgresql:///db?host=/run&password=p%20w&sslpassword=q",
            "postgresql:///db",
            {"p%20w", "p w", "q"},
        ),
        ("sqlite", "sqlite", set()),
    ],
)
def test_what_of_an_address_is_secret(url: str, shown: str, secrets: set[str]) -> None:
    assert shown_database(url) == shown
    assert database_secrets(url) == secrets


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ({"sqlite_errorname": "SQLITE_FULL"}, "SQLITE_FULL"),
        ({"sqlstate": "53100"}, "SQLSTATE 53100"),
        ({}, "OperationalError"),
    ],
)
async def test_what_is_logged_of_an_error_is_the_databases_own_name_for_it(
    names: dict[str, str], kind: str
) -> None:
    cause = type("Cause", (Exception,), names)("with what was sent")

    @asynccontextmanager
    async def failing() -> AsyncIterator[None]:
        raise OperationalError("INSERT a secret", {}, cause)
        yield

    with pytest.raises(LedgerUnavailable) as caught:
        async with asked(failing(), within_s=1.0):
            pass
    assert str(caught.value) == kind
    assert kind_of(DatabaseUnavailable("elsewhere")) == "DatabaseUnavailable"
