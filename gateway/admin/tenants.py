"""`/admin/tenants`: make, show, change and delete tenants while requests run."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError

from gateway.admin.auth import require_operator
from gateway.admin.bodies import body_object, merged, validated
from gateway.admin.cache import CacheAdmin, answer_removal
from gateway.admin.tenant_answers import tenant_answer
from gateway.database.opening import Transactions
from gateway.errors import bad_request
from gateway.http_call import HttpCall
from gateway.registry.audit import AuditTrail, Deed
from gateway.registry.erasing import ErasedWork, erase_work
from gateway.registry.records import RuntimeTenant
from gateway.registry.registry import Registry, tenant_not_found
from gateway.reload import RuntimeConfig, Snapshot
from gateway.settings_tenants import TENANT_ID, TENANT_ID_RULE, TenantSettings
from gateway.wire.unknown_names import refuse_unknown_parameters

_log = structlog.get_logger("forebay.admin")

_KEYS_ELSEWHERE = "Keys are made at POST /admin/keys."


class TenantAdmin:
    """Handlers. Each needs the operator's key. Bodies are entries of the configuration's `tenants`,
    without keys; what the configuration file has to say is shown, and changed there."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        registry: Registry,
        database: Transactions,
        trail: AuditTrail,
        cache: CacheAdmin,
    ) -> None:
        self._runtime = runtime
        self._registry = registry
        self._database = database
        self._trail = trail
        self._cache = cache

    async def show_all(self, call: HttpCall) -> None:
        """Every tenant: the file's, then those made at run time, in the order in which they were
        made."""
        self._admitted(call)
        made = await self._registry.tenants()
        of_file = self._runtime.file.settings.tenants
        shadowed = {tenant.id for tenant in of_file}
        counts = self._key_counts()
        answers = [tenant_answer(each, "file", keys=counts[each.id]) for each in of_file]
        answers += [self._answer(each, counts) for each in made if each.id not in shadowed]
        await call.answer_json({"tenants": answers})

    async def show_one(self, call: HttpCall, tenant_id: str) -> None:
        """One tenant; a 404 if there is none of this id."""
        self._admitted(call)
        counts = self._key_counts()
        for settings in self._runtime.file.settings.tenants:
            if settings.id == tenant_id:
                await call.answer_json(tenant_answer(settings, "file", keys=counts[tenant_id]))
                return
        for tenant in await self._registry.tenants():
            if tenant.id == tenant_id:
                await call.answer_json(self._answer(tenant, counts))
                return
        raise tenant_not_found()

    async def create(self, call: HttpCall, deed: Deed) -> None:
        """Make a tenant, which has no keys yet. 201."""
        snapshot = self._admitted(call)
        values = await body_object(call, snapshot.settings.server.body_limit)
        if "keys" in values:
            raise bad_request(_KEYS_ELSEWHERE, param="keys")
        settings = validated(TenantSettings, values)
        deed.target = settings.id
        tenant = await self._registry.create_tenant(settings, deed)
        _log.info("tenant made", tenant=tenant.id)
        await call.answer_json(self._answer(tenant, self._key_counts()), status=201)

    async def change(self, call: HttpCall, deed: Deed, tenant_id: str) -> None:
        """Change what the body has, as a JSON merge patch: null takes a setting back to its
        default."""
        snapshot = self._admitted(call)
        if not TENANT_ID.fullmatch(tenant_id):
            raise tenant_not_found()
        patch = await body_object(call, snapshot.settings.server.body_limit)
        if "keys" in patch:
            raise bad_request(_KEYS_ELSEWHERE, param="keys")
        if patch.pop("id", tenant_id) != tenant_id:
            raise bad_request("A tenant's id stays what it is.", param="id")
        if not patch:
            raise bad_request("The body must have a setting to change.")

        def change(given: dict[str, Any]) -> TenantSettings:
            return validated(TenantSettings, {**_mapping(merged(given, patch)), "id": tenant_id})

        tenant = await self._registry.change_tenant(tenant_id, change, deed)
        _log.info("tenant changed", tenant=tenant_id)
        await call.answer_json(self._answer(tenant, self._key_counts()))

    async def delete(self, call: HttpCall, deed: Deed, tenant_id: str) -> None:
        """Revoke a tenant's keys and delete it, with its files, its batches, its named prefixes and
        its KV in every tier. Its rows in the ledger stay: they are accounts.

        What could not be reached is named, with a 503; `?unknown=allow` erases what is left of a
        tenant that is not there any more.
        """
        self._admitted(call)
        query = call.query()
        refuse_unknown_parameters(query, ("unknown",))
        unknown = query.get("unknown")
        if unknown not in (None, "allow"):
            raise bad_request("unknown must be allow, or be left out.", param="unknown")
        if not TENANT_ID.fullmatch(tenant_id):
            raise bad_request(f"The tenant's id {TENANT_ID_RULE}.")
        revoked = await self._registry.delete_tenant(tenant_id, deed, unknown=unknown is not None)
        # from then on no gateway lets it in, and nothing new comes to what is erased
        await asyncio.sleep(2 * self._registry.poll_s)
        missed: list[str] = []
        try:
            work = await erase_work(self._database, tenant_id)
        except SQLAlchemyError:
            _log.exception("files and batches could not be erased", tenant=tenant_id)
            work = ErasedWork(0, 0)
            missed.append("files and batches: the database could not be used")
        erased = await self._cache.erase_owner(tenant_id)
        missed += erased.missed
        answer = {
            "tenant": tenant_id,
            "keys_revoked": revoked,
            "files": work.files,
            "batches": work.batches,
            "named_prefixes": erased.named_prefixes,
        }
        detail = {**answer, "models": erased.models, "missed": missed}
        await self._trail.note(
            replace(deed, action="tenant.erase", detail=detail, written=False),
            "failed" if missed else "success",
        )
        _log.info("tenant deleted", tenant=tenant_id, complete=not missed)
        await answer_removal(
            call,
            answer,
            erased.models,
            missed,
            erased.not_covered,
            again="Ask again with ?unknown=allow",
        )

    def _answer(self, tenant: RuntimeTenant, counts: Counter[str]) -> dict[str, Any]:
        return tenant_answer(
            tenant.settings,
            "runtime",
            keys=counts[tenant.id],
            created_s=tenant.created_s,
            updated_s=tenant.updated_s,
            problem=self._runtime.problems.get(tenant.id),
        )

    def _key_counts(self) -> Counter[str]:
        """How many keys let somebody in for each tenant."""
        callers = self._runtime.current.key_ring.callers.values()
        now_s = time.time()
        return Counter(each.tenant.id for each in callers if not each.key.expired(now_s))

    def _admitted(self, call: HttpCall) -> Snapshot:
        snapshot = self._runtime.current
        require_operator(call, snapshot)
        return snapshot


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
