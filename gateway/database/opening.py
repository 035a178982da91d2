"""Opens the database that the settings name, with its tables as this version knows them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from gateway.database.schema import metadata
from gateway.settings_tenants import DatabaseSettings
from gateway.state_dir import StateDir

_FILE = "forebay.sqlite"


@dataclass(frozen=True, slots=True)
class Database:
    """An open database. `shared` is whether gateways on other hosts may use it too."""

    engine: AsyncEngine
    shared: bool

    def begin(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A transaction: committed at the end of its scope, rolled back if that fails. Raises
        sqlalchemy.exc.SQLAlchemyError."""
        return self.engine.begin()


@asynccontextmanager
async def open_database(
    settings: DatabaseSettings, environ: Mapping[str, str]
) -> AsyncIterator[Database]:
    """Connect, and make or upgrade the tables.

    Raises ConfigError, without the URL's password, if the database cannot be reached, refuses us,
    or was written by a later version.
    """
    shared = settings.url != "sqlite"
    if shared:
        url = settings.url.replace("postgresql://", "postgresql+asyncpg://", 1)
    else:
        url = f"sqlite+aiosqlite:///{StateDir.open(environ).path / _FILE}"
    engine = create_async_engine(url)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        yield Database(engine, shared)
    finally:
        await engine.dispose()
