"""An empty database of either kind, for tests that must hold on both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import text

from gateway.database.opening import Database, open_database
from gateway.settings_tenants import DatabaseSettings

KINDS = ("sqlite", "postgresql")


@dataclass(frozen=True)
class Place:
    """Where a database is."""

    url: str
    environ: dict[str, str]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Database]:
        """As one of several gateways would."""
        async with open_database(DatabaseSettings(url=self.url), self.environ) as database:
            yield database


def place(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """A place of this kind that nobody has used; PostgreSQL is started if it is wanted."""
    url = request.getfixturevalue("postgres_url") if kind == "postgresql" else "sqlite"
    return Place(url, {"FOREBAY_STATE_DIR": str(tmp_path / "state")})


async def everything(database: Database) -> str:
    """All rows of all tables, as text."""
    found = []
    async with database.read() as connection:
        for table in ("meta", "tenants", "keys", "audit"):
            rows = await connection.execute(text(f"SELECT * FROM {table}"))
            found += [str(tuple(row)) for row in rows]
    return "\n".join(found)
