"""Gateways that share a database, without anything to serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from gateway.credentials import build_key_ring
from gateway.database.opening import Database
from gateway.errors import ApiError
from gateway.registry.audit import Deed
from gateway.registry.registry import Registry
from gateway.reload import RuntimeConfig, Snapshot
from gateway.settings import Settings
from gateway.settings_tenants import TenantSettings
from gateway.tenants import hash_key
from tests.gateway.database.both import Place

FILE_KEY = "key-of-the-file-0123456789"


def snapshot(*tenants: dict[str, Any], **model: Any) -> Snapshot:
    """A configuration with these tenants; by default acme, whose key is FILE_KEY."""
    entries = tenants or ({"id": "acme", "keys": [{"hash": hash_key(FILE_KEY)}]},)
    settings = Settings.model_validate(
        {"models": [{"name": "m", "path": "bundled", **model}], "tenants": list(entries)}
    )
    return Snapshot(settings, build_key_ring(settings, {}))


def deed(action: str = "test.do") -> Deed:
    return Deed(actor="op-1", action=action, target="")


def tenant(name: str, **settings: Any) -> TenantSettings:
    return TenantSettings.model_validate({"id": name, **settings})


@dataclass
class Gateway:
    """One that follows the database, and what it was told."""

    runtime: RuntimeConfig
    registry: Registry
    followed: list[int] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    def admits(self, key: str) -> bool:
        """Whether somebody with this key is let in."""
        try:
            self.runtime.current.key_ring.identify(f"Bearer {key}")
        except ApiError:
            return False
        return True

    def who(self, key: str) -> str:
        return self.runtime.current.key_ring.identify(f"Bearer {key}").tenant.id


@asynccontextmanager
async def following(
    database: Database,
    file: Snapshot | None = None,
    *,
    runtime: RuntimeConfig | None = None,
    **options: Any,
) -> AsyncIterator[Gateway]:
    """A gateway over an open database, which looks every 50 ms. `options` are the registry's."""
    runtime = runtime or RuntimeConfig(file or snapshot())

    async def follow() -> None:
        gateway.followed.append(len(runtime.current.settings.tenants))

    async def erase(tenant_id: str) -> None:
        gateway.gone.append(tenant_id)

    def on_tenants(ids: Iterable[str]) -> None:
        gateway.known.update(ids)

    defaults = {"on_tenants": on_tenants, "follow": follow, "poll_s": 0.05}
    registry = Registry(database, runtime, **{**defaults, **options})
    registry.on_gone(erase)
    gateway = Gateway(runtime, registry)
    async with registry.following():
        yield gateway


@asynccontextmanager
async def two_gateways(place: Place) -> AsyncIterator[tuple[Gateway, Gateway]]:
    """Each with a connection pool of its own, as two processes have."""
    async with (
        place.open() as first,
        place.open() as second,
        following(first) as one,
        following(second) as other,
    ):
        yield one, other


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait for what another gateway does; fail if it does not in time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what changes is a database, which sets no event
            await asyncio.sleep(0.01)
