"""`/admin/keys`: make, list, rotate, change and revoke keys while requests run."""

from __future__ import annotations

import time

import structlog

from gateway.admin.auth import require_operator
from gateway.admin.bodies import KeyChangeBody, NewKeyBody, RotateBody, body_object, validated
from gateway.admin.tenant_answers import file_key_answer, key_answer
from gateway.errors import bad_request
from gateway.http_call import Header, HttpCall
from gateway.registry.audit import Deed
from gateway.registry.records import RuntimeKey
from gateway.registry.registry import NewKey, Registry, tenant_not_found
from gateway.reload import RuntimeConfig, Snapshot
from gateway.settings_tenants import TENANT_ID
from gateway.wire.unknown_names import refuse_unknown_parameters

_log = structlog.get_logger("forebay.admin")

_SHOWN_ONCE: list[Header] = [(b"cache-control", b"no-store")]


class KeyAdmin:
    """Handlers. Each needs the operator's key. A plain key is in the answer that makes it, and
    nowhere else ever."""

    def __init__(self, runtime: RuntimeConfig, registry: Registry) -> None:
        self._runtime = runtime
        self._registry = registry

    async def show_all(self, call: HttpCall) -> None:
        """Every key, or those of `?tenant=`: the file's, then those made at run time, revoked ones
        too, in the order in which they were made."""
        self._admitted(call)
        query = call.query()
        refuse_unknown_parameters(query, ("tenant",))
        tenant = query.get("tenant")
        if tenant is not None and not TENANT_ID.fullmatch(tenant):
            raise tenant_not_found("tenant")
        made = await self._registry.keys(tenant)
        callers = self._runtime.file.key_ring.callers.values()
        of_file = [each for each in callers if tenant in (None, each.tenant.id)]
        await call.answer_json(
            {"keys": [*map(file_key_answer, of_file), *(self._answer(key) for key in made)]}
        )

    async def show_one(self, call: HttpCall, key_id: str) -> None:
        """One key; a 404 if there is none of this id."""
        self._admitted(call)
        of_file = self._runtime.file.key_ring.callers.get(key_id)
        if of_file is not None:
            await call.answer_json(file_key_answer(of_file))
            return
        await call.answer_json(self._answer(await self._registry.key(key_id)))

    async def create(self, call: HttpCall, deed: Deed) -> None:
        """`{"tenant": ID}` with `name`, `expires_at` or `expires_in`, and `limits`; the answer's
        `key` is shown this once. 201."""
        snapshot = self._admitted(call)
        values = await body_object(call, snapshot.settings.server.body_limit)
        body = validated(NewKeyBody, values)
        deed.detail["tenant"] = body.tenant
        made = await self._registry.create_key(
            body.tenant,
            deed,
            name=body.name,
            expires_s=body.expires_s(time.time()),
            limits=body.limits,
        )
        _log.info("key made", key=made.record.id, tenant=body.tenant)
        await self._answer_new(call, made)

    async def rotate(self, call: HttpCall, deed: Deed, key_id: str) -> None:
        """Make a key in place of another, which stays valid for `grace_s` (a day, if not said). The
        answer is the new key's, with `replaces`. 201."""
        snapshot = self._admitted(call)
        values = await body_object(call, snapshot.settings.server.body_limit)
        body = validated(RotateBody, values)
        made = await self._registry.rotate_key(
            key_id, deed, grace_s=body.grace_s, lifetime_s=body.expires_in
        )
        _log.info("key rotated", key=key_id, new_key=made.record.id)
        await self._answer_new(call, made, replaces=key_id)

    async def change(self, call: HttpCall, deed: Deed, key_id: str) -> None:
        """Change a key's `name`, its end, or its `limits` as a whole."""
        snapshot = self._admitted(call)
        values = await body_object(call, snapshot.settings.server.body_limit)
        if not values:
            raise bad_request("The body must have name, expires_at, expires_in or limits.")
        body = validated(KeyChangeBody, values)
        given = body.model_fields_set
        key = await self._registry.change_key(
            key_id,
            deed,
            name=body.name if "name" in given else None,
            expires=(body.expires_s(time.time()),) if given & _ENDS else None,
            limits=body.limits if "limits" in given else None,
        )
        _log.info("key changed", key=key_id)
        await call.answer_json(self._answer(key))

    async def revoke(self, call: HttpCall, deed: Deed, key_id: str) -> None:
        """Let nobody in with it any more, for good."""
        self._admitted(call)
        key = await self._registry.revoke_key(key_id, deed)
        _log.info("key revoked", key=key_id, tenant=key.tenant)
        await call.answer_json(self._answer(key))

    async def _answer_new(self, call: HttpCall, made: NewKey, **more: str) -> None:
        answer = {**self._answer(made.record), **more, "key": made.plain}
        await call.answer_json(answer, status=201, headers=_SHOWN_ONCE)

    def _answer(self, key: RuntimeKey) -> dict[str, object]:
        return key_answer(key, time.time(), self._runtime.problems.get(key.id))

    def _admitted(self, call: HttpCall) -> Snapshot:
        snapshot = self._runtime.current
        require_operator(call, snapshot)
        return snapshot


_ENDS = frozenset({"expires_at", "expires_in"})
