"""Keeps what is in use as the database has it, whichever gateway changes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic

import structlog
from sqlalchemy.exc import SQLAlchemyError

from gateway.database.opening import Transactions
from gateway.ended_tasks import end_task
from gateway.registry import tables
from gateway.registry.records import Overlay
from gateway.reload import RuntimeConfig

_log = structlog.get_logger("forebay.registry")


async def nobody(*_: object) -> None:
    """Nothing lies deeper than a request looks."""


class Follower:
    """Lays the tenants and keys of a database over the configuration file's in `runtime`.

    A database that is away leaves what is last known. Belongs to the event loop.
    """

    def __init__(
        self,
        database: Transactions,
        runtime: RuntimeConfig,
        *,
        on_tenants: Callable[[Iterable[str]], None],
        follow: Callable[[], Awaitable[object]],
        poll_s: float,
    ) -> None:
        """See `Registry`."""
        self._database = database
        self._runtime = runtime
        self._on_tenants = on_tenants
        self._follow = follow
        self._on_gone: Callable[[str], Awaitable[object]] = nobody
        self._poll_s = poll_s
        self._one_reads = asyncio.Lock()
        self._chores: set[asyncio.Task[None]] = set()
        self._away = False
        self._seen_s = monotonic()
        self.deleting: set[str] = set()
        """Tenants that are being deleted by this gateway, whose caller sees to the rest."""

    @property
    def stale_s(self) -> float:
        """How long ago the database last said what it holds."""
        return monotonic() - self._seen_s

    def on_gone(self, erase: Callable[[str], Awaitable[object]]) -> None:
        """Have `erase` called with each tenant that another gateway deletes."""
        self._on_gone = erase

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """A scope in which changes are followed. What the database holds is in use from its begin
        on; raises SQLAlchemyError if it cannot be read then."""
        await self.refresh()
        polling = asyncio.create_task(self._poll())
        try:
            yield
        finally:
            await asyncio.gather(*map(end_task, (polling, *self._chores)))

    async def refresh(self) -> None:
        """Use what the database holds now. Raises SQLAlchemyError."""
        async with self._one_reads:
            async with self._database.read() as connection:
                overlay = await tables.read_overlay(connection)
            self._seen_s = monotonic()
            before = self._runtime.current
            # what a later version has written and this one cannot read is not gone
            gone = _ids(self._runtime.overlay) - _ids(overlay) - overlay.unreadable.keys()
            await self._runtime.use_overlay(overlay)
            after = self._runtime.current
        if after.settings is before.settings:
            return
        self._on_tenants(tenant.id for tenant in after.settings.tenants)
        self._begin(self._follow)
        gone -= {tenant.id for tenant in after.settings.tenants} | self.deleting
        for tenant_id in gone:
            self._begin(partial(self._on_gone, tenant_id))

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self._look()
            except SQLAlchemyError as error:
                if not self._away:
                    self._away = True
                    _log.error(
                        "the database cannot be asked: tenants and keys stay as last known",
                        reason=type(error).__name__,
                    )
            except Exception:  # noqa: BLE001 - a bug must not end the watch over revoked keys
                _log.exception("tenants and keys could not be looked at")

    async def _look(self) -> None:
        if self._away:
            await self.refresh()  # whatever the version says: it may be a restored copy
            self._away = False
            _log.info("the database answers again", stale_s=round(self.stale_s, 1))
            return
        async with self._database.read() as connection:
            version = await tables.read_version(connection)
        if version != self._runtime.overlay.version:
            await self.refresh()
        self._seen_s = monotonic()

    def _begin(self, chore: Callable[[], Awaitable[object]]) -> None:
        task = asyncio.create_task(_carried_out(chore))
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)


async def _carried_out(chore: Callable[[], Awaitable[object]]) -> None:
    try:
        await chore()
    except Exception:  # noqa: BLE001 - the change itself is in use, and others are to follow
        _log.exception("a change of tenants could not be followed in full")


def _ids(overlay: Overlay) -> set[str]:
    return {tenant.id for tenant in overlay.tenants}
