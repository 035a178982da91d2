"""The registry: changes tenants and keys at run time, for all gateways of one database."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.database.opening import Transactions
from gateway.errors import ApiError, bad_request, unavailable
from gateway.registry import tables
from gateway.registry.audit import AuditTrail, Deed, write_deed
from gateway.registry.following import Follower, nobody
from gateway.registry.merging import misfit_of
from gateway.registry.metrics import RegistryStats
from gateway.registry.records import RuntimeKey, RuntimeTenant
from gateway.reload import RuntimeConfig
from gateway.settings_tenants import LimitSettings, TenantSettings
from gateway.state_dir import new_key
from gateway.tenants import hash_key

_log = structlog.get_logger("forebay.registry")

POLL_S = 0.5
"""How often it is asked whether another gateway has changed something."""
_RETRY_AFTER_S = 5


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key as it was made: the one moment at which `plain` is known."""

    record: RuntimeKey
    plain: str = field(repr=False)


class Registry:
    """Tenants and keys of the database, laid over the configuration file's in `runtime`.

    Belongs to the event loop. Methods that change something write it down together with its audit
    row or not at all, are in use here when they return, and elsewhere within a second. They raise
    ApiError: 404 for what is not there, 409 for what the configuration file has to say, 503 while
    the database cannot be used.
    """

    def __init__(
        self,
        database: Transactions,
        runtime: RuntimeConfig,
        *,
        on_tenants: Callable[[Iterable[str]], None] = lambda _: None,
        follow: Callable[[], Awaitable[object]] = nobody,
        clock: Callable[[], float] = time.time,
        poll_s: float = POLL_S,
    ) -> None:
        """`on_tenants` hears of all tenants' ids when they change; then `follow` has what lies
        deeper than a request looks do as the configuration in use says."""
        self._database = database
        self._runtime = runtime
        self._clock = clock
        self._poll_s = poll_s
        self._follower = Follower(
            database, runtime, on_tenants=on_tenants, follow=follow, poll_s=poll_s
        )

    @property
    def poll_s(self) -> float:
        """After twice this every gateway has seen a change, if the database answers."""
        return self._poll_s

    def following(self) -> AbstractAsyncContextManager[None]:
        """A scope in which changes are followed. What the database holds is in use from its begin
        on; raises SQLAlchemyError if it cannot be read then."""
        return self._follower.following()

    async def refresh(self) -> None:
        """Use what the database holds now. Raises SQLAlchemyError."""
        await self._follower.refresh()

    def on_gone(self, erase: Callable[[str], Awaitable[object]]) -> None:
        """Have `erase` called with each tenant that another gateway deletes."""
        self._follower.on_gone(erase)

    def stats(self, trail: AuditTrail) -> RegistryStats:
        """For the metrics. Any thread."""
        overlay = self._runtime.overlay
        return RegistryStats(
            stale_s=self._follower.stale_s,
            tenants=len(overlay.tenants),
            keys=len(overlay.keys),
            not_in_use=len(self._runtime.problems),
            audit_rows_lost=trail.lost,
        )

    async def tenants(self) -> list[RuntimeTenant]:
        """Those made at run time, as the database has them now."""
        async with self._reading() as connection:
            return await tables.read_tenants(connection, {})

    async def create_tenant(self, settings: TenantSettings, deed: Deed) -> RuntimeTenant:
        """Make a tenant; a 409 if there is one of this id, a 400 if it does not fit the others."""
        self._refuse_files_tenant(settings.id)
        now_s = self._clock()
        tenant = RuntimeTenant(settings, now_s, now_s)
        async with self._changing(deed) as connection:
            await self._require_fit(connection, settings)
            try:
                await tables.insert_tenant(connection, tenant)
            except IntegrityError:
                raise ApiError(
                    409, "There is a tenant of this id.", param="id", code="tenant_exists"
                ) from None
            deed.detail["settings"] = tables.given_settings(settings)
        return tenant

    async def change_tenant(
        self, tenant_id: str, change: Callable[[dict[str, Any]], TenantSettings], deed: Deed
    ) -> RuntimeTenant:
        """Have its settings be what `change` makes of those that were given before; ApiErrors of
        `change` pass."""
        self._refuse_files_tenant(tenant_id)
        async with self._changing(deed) as connection:
            found = await tables.read_tenant(connection, tenant_id)
            if found is None:
                raise tenant_not_found()
            settings = change(tables.given_settings(found.settings))
            await self._require_fit(connection, settings)
            tenant = replace(found, settings=settings, updated_s=self._clock())
            await tables.update_tenant(connection, tenant)
            deed.detail["settings"] = tables.given_settings(settings)
        return tenant

    async def delete_tenant(self, tenant_id: str, deed: Deed, *, unknown: bool) -> int:
        """Delete a tenant and revoke its keys; returns how many those were. `unknown`: it may have
        been deleted before, or be none of ours at all."""
        self._refuse_files_tenant(tenant_id)
        self._follower.deleting.add(tenant_id)
        try:
            async with self._changing(deed) as connection:
                if not await tables.delete_tenant(connection, tenant_id) and not unknown:
                    raise tenant_not_found()
                revoked = await tables.revoke_keys(connection, tenant_id, self._clock())
                deed.detail["keys_revoked"] = revoked
        finally:
            self._follower.deleting.discard(tenant_id)
        return revoked

    async def keys(self, tenant_id: str | None) -> list[RuntimeKey]:
        """A tenant's keys that were made at run time, or all of them, revoked ones too."""
        async with self._reading() as connection:
            return await tables.read_keys(connection, tenant_id)

    async def key(self, key_id: str) -> RuntimeKey:
        """One key that was made at run time; a 404 if there is none."""
        async with self._reading() as connection:
            return await self._existing_key(connection, key_id)

    async def create_key(
        self,
        tenant_id: str,
        deed: Deed,
        *,
        name: str = "",
        expires_s: float | None = None,
        limits: LimitSettings = LimitSettings(),  # noqa: B008 - frozen
    ) -> NewKey:
        """Make a key of a tenant from either place; a 404 if there is no such tenant."""
        made = self._make_key(tenant_id, name=name, expires_s=expires_s, limits=limits)
        async with self._changing(deed) as connection:
            in_file = tenant_id in self._files_tenants()
            if not in_file and await tables.read_tenant(connection, tenant_id) is None:
                raise tenant_not_found("tenant")
            await tables.insert_key(connection, made.record)
            deed.target = made.record.id
            deed.detail |= _key_detail(made.record)
        return made

    async def rotate_key(
        self, key_id: str, deed: Deed, *, grace_s: float, lifetime_s: float | None
    ) -> NewKey:
        """Make a key in place of another, which is valid for `grace_s` seconds more, unless it
        expires before. The new one has its name and limits, and expires after `lifetime_s` seconds,
        if that is given, else as long after it was made as the old one. A 409 for a key that was
        replaced before or lets nobody in."""
        self._refuse_files_key(key_id)
        async with self._changing(deed) as connection:
            old = await self._living_key(connection, key_id)
            if old.replaced_by is not None:
                raise ApiError(
                    409,
                    f"This key was replaced before, by {old.replaced_by}: rotate that one.",
                    code="key_replaced",
                )
            now_s = self._clock()
            if lifetime_s is None and old.expires_s is not None:
                lifetime_s = old.expires_s - old.created_s
            made = self._make_key(
                old.tenant,
                name=old.name,
                expires_s=None if lifetime_s is None else now_s + lifetime_s,
                limits=old.limits,
            )
            await tables.insert_key(connection, made.record)
            ends_s = min(now_s + grace_s, old.expires_s or float("inf"))
            await tables.update_key(
                connection, replace(old, expires_s=ends_s, replaced_by=made.record.id)
            )
            deed.detail |= {"new_key": made.record.id, "old_expires_at": ends_s}
        return made

    async def change_key(
        self,
        key_id: str,
        deed: Deed,
        *,
        name: str | None = None,
        expires: tuple[float | None] | None = None,
        limits: LimitSettings | None = None,
    ) -> RuntimeKey:
        """Change what is given: `expires` is its new end in a tuple, (None,) for none. A 409 for a
        key that is revoked, and for a later end of one that was replaced: its time is measured."""
        self._refuse_files_key(key_id)
        async with self._changing(deed) as connection:
            key = await self._existing_key(connection, key_id)
            if key.revoked_s is not None:
                raise ApiError(409, "This key is revoked, for good.", code="key_revoked")
            if name is not None:
                key = replace(key, name=name)
                deed.detail["name"] = name
            if expires is not None:
                _refuse_longer_grace(key, expires[0], self._clock())
                key = replace(key, expires_s=expires[0])
                deed.detail["expires_at"] = expires[0]
            await tables.update_key(connection, key)
            if limits is not None:
                key = replace(key, limits=limits)
                await tables.update_key_limits(connection, key_id, limits)
                deed.detail["limits"] = limits.model_dump(mode="json", exclude_unset=True)
        return key

    async def revoke_key(self, key_id: str, deed: Deed) -> RuntimeKey:
        """Let nobody in with it any more; a key that was revoked before stays so."""
        self._refuse_files_key(key_id)
        async with self._changing(deed) as connection:
            key = await self._existing_key(connection, key_id)
            if key.revoked_s is None:
                key = replace(key, revoked_s=self._clock())
                await tables.update_key(connection, key)
            deed.detail["tenant"] = key.tenant
        return key

    @asynccontextmanager
    async def _changing(self, deed: Deed) -> AsyncIterator[AsyncConnection]:
        """A change, all of it or nothing, with its audit row; then it is in use here."""
        try:
            async with self._database.begin(durable=True) as connection:
                await tables.count_change(connection)
                yield connection
                await write_deed(connection, deed, "success")
        except SQLAlchemyError as error:
            raise _unusable(error) from None
        deed.written = True
        try:
            await self.refresh()
        except SQLAlchemyError as error:  # it is done all the same, and seen by the next look
            _log.warning("change not yet in use", reason=type(error).__name__)

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncConnection]:
        try:
            async with self._database.read() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise _unusable(error) from None

    async def _existing_key(self, connection: AsyncConnection, key_id: str) -> RuntimeKey:
        key = await tables.read_key(connection, key_id)
        if key is None:
            raise ApiError(404, "There is no key of this id.", code="key_not_found")
        return key

    async def _living_key(self, connection: AsyncConnection, key_id: str) -> RuntimeKey:
        key = await self._existing_key(connection, key_id)
        state = key.state(self._clock())
        if state != "active":
            raise ApiError(409, f"This key is {state}: make a new one.", code=f"key_{state}")
        return key

    def _make_key(
        self, tenant_id: str, *, name: str, expires_s: float | None, limits: LimitSettings
    ) -> NewKey:
        plain = new_key()
        record = RuntimeKey(
            id="key-" + secrets.token_hex(8),
            tenant=tenant_id,
            hashed=hash_key(plain),
            name=name,
            limits=limits,
            created_s=self._clock(),
            expires_s=expires_s,
        )
        return NewKey(record, plain)

    async def _require_fit(self, connection: AsyncConnection, settings: TenantSettings) -> None:
        runtime = [each.settings for each in await tables.read_tenants(connection, {})]
        file = self._runtime.file.settings
        others = [each for each in (*file.tenants, *runtime) if each.id != settings.id]
        misfit = misfit_of(settings, file, others)
        if misfit is not None:
            raise bad_request(f"{misfit.field}: {misfit.reason}.", param=misfit.field)

    def _files_tenants(self) -> set[str]:
        return {tenant.id for tenant in self._runtime.file.settings.tenants}

    def _refuse_files_tenant(self, tenant_id: str) -> None:
        if tenant_id in self._files_tenants():
            raise ApiError(
                409,
                "A tenant of this id is in the configuration file (without one, in forebay's own "
                "configuration): that is where it is changed.",
                code="tenant_in_file",
            )

    def _refuse_files_key(self, key_id: str) -> None:
        if key_id in self._runtime.file.key_ring.callers:
            raise ApiError(
                409,
                "This key is in the configuration file (without one, in forebay's own "
                "configuration): that is where it is changed.",
                code="key_in_file",
            )


def tenant_not_found(param: str | None = None) -> ApiError:
    """404."""
    return ApiError(404, "There is no tenant of this id.", param=param, code="tenant_not_found")


def _unusable(error: SQLAlchemyError) -> ApiError:
    _log.error("the database cannot be used", reason=type(error).__name__)
    return unavailable(
        "The database cannot be used right now.",
        code="database_unavailable",
        retry_after_s=_RETRY_AFTER_S,
    )


def _refuse_longer_grace(key: RuntimeKey, expires_s: float | None, now_s: float) -> None:
    if key.replaced_by is None or key.expires_s is None:
        return
    if expires_s is None or expires_s > max(now_s, key.expires_s):
        raise ApiError(
            409,
            f"This key was replaced by {key.replaced_by}, and ends when its time of grace is over; "
            "it can only end sooner.",
            param="expires_at",
            code="key_replaced",
        )


def _key_detail(key: RuntimeKey) -> Mapping[str, Any]:
    return {
        "tenant": key.tenant,
        "name": key.name,
        "expires_at": key.expires_s,
        "limits": key.limits.model_dump(mode="json", exclude_unset=True),
    }
