"""Tables of every age end up as those of the present, and the audit trail keeps what it has."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Connection, Inspector, insert, inspect, select, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from gateway.database.migrations import LaterSchemaError, bring_up_to_date
from gateway.database.opening import Database
from gateway.database.schema import VERSION, audit, meta, metadata
from tests.gateway.database.both import KINDS, Place, everything, place

ROW = {
    "at_s": 1.0,
    "actor": "op-1",
    "action": "key.create",
    "target": "key-1",
    "outcome": "success",
}


@pytest.fixture(params=KINDS)
def somewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place(request.param, tmp_path, request)


async def columns(database: Database, table: str) -> set[str]:
    def of(connection: Connection) -> set[str]:
        inspector: Inspector = inspect(connection)
        return {each["name"] for each in inspector.get_columns(table)}

    async with database.read() as connection:
        return await connection.run_sync(of)


async def test_an_empty_database_gets_every_table(somewhere: Place) -> None:
    async with somewhere.open() as database:
        for table in metadata.tables.values():
            assert await columns(database, table.name) == {each.name for each in table.columns}


async def test_older_tables_are_brought_up_step_by_step_and_once(somewhere: Place) -> None:
    taken: list[int] = []

    def to_next(connection: Connection) -> None:
        taken.append(VERSION)
        connection.execute(text("ALTER TABLE tenants ADD COLUMN one INTEGER"))

    def to_last(connection: Connection) -> None:
        taken.append(VERSION + 1)
        connection.execute(text("ALTER TABLE tenants ADD COLUMN two INTEGER"))

    steps = {VERSION: to_next, VERSION + 1: to_last}

    def migrate(connection: Connection) -> None:
        bring_up_to_date(connection, version=VERSION + 2, migrations=steps)

    async with somewhere.open() as database:
        for _ in range(2):
            async with database.begin() as connection:
                await connection.run_sync(migrate)
        assert taken == [VERSION, VERSION + 1]
        assert {"one", "two"} <= await columns(database, "tenants")
        async with database.begin() as connection:
            with pytest.raises(LaterSchemaError) as caught:
                await connection.run_sync(bring_up_to_date)
            assert caught.value.found == VERSION + 2


async def test_a_step_that_fails_changes_nothing(somewhere: Place) -> None:
    def fails(connection: Connection) -> None:
        connection.execute(text("ALTER TABLE tenants ADD COLUMN one INTEGER"))
        connection.execute(text("ALTER TABLE nothing ADD COLUMN one INTEGER"))

    def migrate(connection: Connection) -> None:
        bring_up_to_date(connection, version=VERSION + 1, migrations={VERSION: fails})

    async with somewhere.open() as database:
        with pytest.raises(SQLAlchemyError):
            async with database.begin() as connection:
                await connection.run_sync(migrate)
        assert "one" not in await columns(database, "tenants")
        async with database.read() as connection:
            version = await connection.scalar(
                select(meta.c.value).where(meta.c.key == "schema_version")
            )
    assert version == str(VERSION)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET actor = 'somebody else'",
        "DELETE FROM audit",
        "DELETE FROM audit WHERE id = 1",
        "INSERT OR REPLACE INTO audit (id, at_s, actor, action, target, detail, client, "
        "request_id, outcome) VALUES (1, 2.0, 'x', 'x', 'x', '{}', '', '', 'x')",
        "TRUNCATE audit",
    ],
)
async def test_the_audit_trail_is_append_only(somewhere: Place, statement: str) -> None:
    if (somewhere.url == "sqlite") == statement.startswith("TRUNCATE"):
        statement = "DELETE FROM audit WHERE id > 0"  # the other one's dialect
    if somewhere.url != "sqlite" and statement.startswith("INSERT OR"):
        statement = "UPDATE audit SET id = 7"
    async with somewhere.open() as database:
        async with database.begin() as connection:
            await connection.execute(insert(audit), [ROW, {**ROW, "target": "key-2"}])
        before = await everything(database)
        with pytest.raises(DBAPIError, match="append-only"):
            async with database.begin() as connection:
                await connection.execute(text(statement))
        assert await everything(database) == before
        async with database.begin() as connection:
            await connection.execute(insert(audit), [ROW])
