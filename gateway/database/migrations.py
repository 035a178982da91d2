"""Makes the tables, or brings those of an older version up to date, once for all who start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from sqlalchemy import Connection, insert, inspect, select, text, update

from gateway.database.schema import VERSION, meta, metadata

Migration = Callable[[Connection], None]

MIGRATIONS: Mapping[int, Migration] = MappingProxyType({})
"""How to get from each earlier version to the one after it."""

REGISTRY_VERSION = "registry_version"
_SCHEMA_VERSION = "schema_version"
_LOCK = 0x666F7265626179  # any number, as long as every gateway takes the same

_APPEND_ONLY = {
    "sqlite": (
        """CREATE TRIGGER audit_keeps_rows BEFORE UPDATE ON audit
           BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END""",
        """CREATE TRIGGER audit_loses_nothing BEFORE DELETE ON audit
           BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END""",
        # INSERT OR REPLACE deletes without asking the trigger above
        """CREATE TRIGGER audit_replaces_nothing BEFORE INSERT ON audit
           WHEN NEW.id IN (SELECT id FROM audit)
           BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END""",
    ),
    "postgresql": (
        """CREATE OR REPLACE FUNCTION forebay_append_only() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN RAISE EXCEPTION 'the audit trail is append-only'; END $$""",
        """CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE ON audit
           FOR EACH ROW EXECUTE FUNCTION forebay_append_only()""",
        """CREATE TRIGGER audit_not_emptied BEFORE TRUNCATE ON audit
           FOR EACH STATEMENT EXECUTE FUNCTION forebay_append_only()""",
    ),
}


class LaterSchemaError(Exception):
    """The tables were made by a later version than this one; `found` is theirs."""

    def __init__(self, found: int) -> None:
        super().__init__(f"schema version {found}, newer than {VERSION}")
        self.found = found


class UnknownSchemaError(Exception):
    """The tables are those of no version that there was. The message is half a sentence."""


def bring_up_to_date(
    connection: Connection,
    *,
    version: int = VERSION,
    migrations: Mapping[int, Migration] = MIGRATIONS,
) -> None:
    """Have the tables be those of `version`, within the transaction of the connection, which on
    SQLite must be a writing one: whoever else starts waits for its end.

    Raises LaterSchemaError and UnknownSchemaError with nothing changed.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    found = _version(connection)
    if found is None:
        _make(connection, version)
        return
    if found > version:
        raise LaterSchemaError(found)
    steps = range(found, version)
    if not all(step in migrations for step in steps):
        raise UnknownSchemaError(f"its schema is of version {found}, which is not known")
    for step in steps:
        migrations[step](connection)
    if found < version:
        connection.execute(
            update(meta).where(meta.c.key == _SCHEMA_VERSION).values(value=str(version))
        )
    # a copy that was put back in part would take rows from nobody, and say so in the log alone
    inspector = inspect(connection)
    lacking = [name for name in sorted(metadata.tables) if not inspector.has_table(name)]
    if lacking:
        raise UnknownSchemaError(f"it lacks the table {lacking[0]}")


def _version(connection: Connection) -> int | None:
    """Of the tables that are there; None if there are none."""
    if not inspect(connection).has_table(meta.name):
        return None
    found = connection.scalar(select(meta.c.value).where(meta.c.key == _SCHEMA_VERSION))
    if found is None:
        raise UnknownSchemaError("its schema's version is missing")
    try:
        return int(found)
    except ValueError:
        raise UnknownSchemaError("its schema's version is no number") from None


def _make(connection: Connection, version: int) -> None:
    metadata.create_all(connection)
    for statement in _APPEND_ONLY[connection.dialect.name]:
        connection.execute(text(statement))
    rows = [(_SCHEMA_VERSION, str(version)), (REGISTRY_VERSION, "0")]
    connection.execute(insert(meta), [{"key": key, "value": value} for key, value in rows])
