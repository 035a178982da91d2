"""The registry's rows: reading and writing them within somebody's transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import orjson
from sqlalchemy import Row, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.database.migrations import REGISTRY_VERSION
from gateway.database.schema import keys, meta, tenants
from gateway.registry.records import Overlay, RuntimeKey, RuntimeTenant
from gateway.settings_tenants import KEY_HASH, LimitSettings, TenantSettings

_UNREADABLE = "its settings are none that this version knows"
_UNUSABLE = (ValueError, TypeError)
"""What settings raise that are not right, or not even JSON: one row must not put out all others."""


async def read_version(connection: AsyncConnection) -> int:
    """How many changes there have been."""
    return int(
        await connection.scalar(select(meta.c.value).where(meta.c.key == REGISTRY_VERSION)) or 0
    )


async def count_change(connection: AsyncConnection) -> None:
    """Have every gateway look again. The first thing of each change: until its end, others wait
    here, so that what it reads stays true."""
    row = meta.c.key == REGISTRY_VERSION
    await connection.execute(update(meta).where(row).values(value=meta.c.value))  # the row's lock
    version = await read_version(connection)
    await connection.execute(update(meta).where(row).values(value=str(version + 1)))


async def read_overlay(connection: AsyncConnection) -> Overlay:
    """All that is in use, of one moment if the transaction sees one."""
    unreadable: dict[str, str] = {}
    found_tenants = await read_tenants(connection, unreadable)
    rows = (await connection.execute(select(keys).where(keys.c.revoked_s.is_(None)))).all()
    version = await read_version(connection)
    # there may be many: not on the event loop
    found_keys = await asyncio.to_thread(_usable_keys, rows, unreadable)
    return Overlay(version, tuple(found_tenants), tuple(found_keys), unreadable)


async def read_tenants(
    connection: AsyncConnection, unreadable: dict[str, str]
) -> list[RuntimeTenant]:
    """In the order in which they were made; those that cannot be read are put into
    `unreadable`."""
    found = []
    for row in await connection.execute(
        select(tenants).order_by(tenants.c.created_s, tenants.c.id)
    ):
        try:
            found.append(_tenant(row))
        except _UNUSABLE:
            unreadable[row.id] = _UNREADABLE
    return found


async def read_tenant(connection: AsyncConnection, tenant_id: str) -> RuntimeTenant | None:
    """One tenant; None if there is none, or none that can be read."""
    row = (await connection.execute(select(tenants).where(tenants.c.id == tenant_id))).first()
    try:
        return None if row is None else _tenant(row)
    except _UNUSABLE:
        return None


async def insert_tenant(connection: AsyncConnection, tenant: RuntimeTenant) -> None:
    """Raises IntegrityError where there is one of this id."""
    await connection.execute(
        insert(tenants).values(
            id=tenant.id,
            settings=stored_settings(tenant.settings),
            created_s=tenant.created_s,
            updated_s=tenant.updated_s,
        )
    )


async def update_tenant(connection: AsyncConnection, tenant: RuntimeTenant) -> None:
    """Its settings and when they were changed."""
    await connection.execute(
        update(tenants)
        .where(tenants.c.id == tenant.id)
        .values(settings=stored_settings(tenant.settings), updated_s=tenant.updated_s)
    )


async def delete_tenant(connection: AsyncConnection, tenant_id: str) -> bool:
    """Whether there was one."""
    done = await connection.execute(delete(tenants).where(tenants.c.id == tenant_id))
    return done.rowcount > 0


async def read_keys(connection: AsyncConnection, tenant_id: str | None) -> list[RuntimeKey]:
    """A tenant's, or all of them, revoked ones too, in the order in which they were made."""
    query = select(keys).order_by(keys.c.created_s, keys.c.id)
    if tenant_id is not None:
        query = query.where(keys.c.tenant == tenant_id)
    return [_shown_key(row) for row in await connection.execute(query)]


async def read_key(connection: AsyncConnection, key_id: str) -> RuntimeKey | None:
    """One key, revoked or not; None if there is none."""
    row = (await connection.execute(select(keys).where(keys.c.id == key_id))).first()
    return None if row is None else _shown_key(row)


async def insert_key(connection: AsyncConnection, key: RuntimeKey) -> None:
    """Add it."""
    await connection.execute(
        insert(keys).values(
            id=key.id,
            tenant=key.tenant,
            hash=key.hashed,
            name=key.name,
            limits=stored_limits(key.limits),
            created_s=key.created_s,
            expires_s=key.expires_s,
            revoked_s=key.revoked_s,
            replaced_by=key.replaced_by,
        )
    )


async def update_key(connection: AsyncConnection, key: RuntimeKey) -> None:
    """All of it that may change but its limits."""
    await connection.execute(
        update(keys)
        .where(keys.c.id == key.id)
        .values(
            name=key.name,
            expires_s=key.expires_s,
            revoked_s=key.revoked_s,
            replaced_by=key.replaced_by,
        )
    )


async def update_key_limits(
    connection: AsyncConnection, key_id: str, limits: LimitSettings
) -> None:
    """Its own limits."""
    await connection.execute(
        update(keys).where(keys.c.id == key_id).values(limits=stored_limits(limits))
    )


async def revoke_keys(connection: AsyncConnection, tenant_id: str, now_s: float) -> int:
    """Revoke all of a tenant's keys; returns how many were not yet."""
    done = await connection.execute(
        update(keys)
        .where(keys.c.tenant == tenant_id, keys.c.revoked_s.is_(None))
        .values(revoked_s=now_s)
    )
    return done.rowcount


def given_settings(settings: TenantSettings) -> dict[str, Any]:
    """What was said of a tenant, as JSON values; what was not follows the defaults of whichever
    version reads it."""
    return settings.model_dump(
        mode="json", by_alias=True, exclude_unset=True, exclude={"id", "keys"}
    )


def stored_settings(settings: TenantSettings) -> str:
    """As the `settings` column has it."""
    return orjson.dumps(given_settings(settings)).decode()


def stored_limits(limits: LimitSettings) -> str:
    """As the `limits` column has it."""
    return orjson.dumps(limits.model_dump(mode="json", exclude_unset=True)).decode()


def _tenant(row: Row[Any]) -> RuntimeTenant:
    settings = TenantSettings.model_validate({**orjson.loads(row.settings), "id": row.id})
    return RuntimeTenant(settings, row.created_s, row.updated_s)


def _usable_keys(rows: Iterable[Row[Any]], unreadable: dict[str, str]) -> list[RuntimeKey]:
    found = []
    for row in rows:
        try:
            found.append(_key(row))
        except _UNUSABLE:
            unreadable[row.id] = _UNREADABLE
    return found


def _key(row: Row[Any]) -> RuntimeKey:
    if not KEY_HASH.fullmatch(row.hash):
        raise ValueError("this is no key's hash")
    return _key_with(row, LimitSettings.model_validate(orjson.loads(row.limits)))


def _shown_key(row: Row[Any]) -> RuntimeKey:
    """A key to be listed or revoked, whatever its limits look like."""
    try:
        return _key(row)
    except _UNUSABLE:
        return _key_with(row, LimitSettings())


def _key_with(row: Row[Any], limits: LimitSettings) -> RuntimeKey:
    return RuntimeKey(
        id=row.id,
        tenant=row.tenant,
        hashed=row.hash,
        name=row.name,
        limits=limits,
        created_s=row.created_s,
        expires_s=row.expires_s,
        revoked_s=row.revoked_s,
        replaced_by=row.replaced_by,
    )
