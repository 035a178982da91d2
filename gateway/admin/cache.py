"""The operator's view of the cache, and removal from it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
import structlog

from cache.hashing import owner_tags
from cache.report import Erased
from gateway.admin.auth import require_operator
from gateway.admin.cache_answers import erased_answer, stats_answer, tenants_by_tag
from gateway.admin.remembered import remembered
from gateway.dispatch.member import Condition
from gateway.errors import ApiError, bad_request, unavailable
from gateway.explain import explained
from gateway.http_call import HttpCall
from gateway.models import Models
from gateway.named_caches import ErasedNames
from gateway.recent_requests import RecentRequests
from gateway.reload import RuntimeConfig, Snapshot
from gateway.replica import Replica, ReplicaUnavailable
from gateway.served_model import ServedModel
from gateway.settings_tenants import TENANT_ID, TENANT_ID_RULE
from gateway.wire.unknown_names import refuse_unknown_parameters

_log = structlog.get_logger("forebay.admin")

_REMOVAL_S = 120.0
"""Longest wait for one model's removal: finding a tenant's blocks in a large Redis takes long."""
_RETRY_AFTER_S = 5

Removal = Callable[[Replica], Awaitable[Erased]]


class NamedPrefixes(Protocol):
    """What erasure needs of the tenants' named prefixes."""

    async def erase_tenant(self, tenant_id: str, user: str | None) -> ErasedNames:
        """Forget a tenant's, or one of its users', names."""
        ...


@dataclass(frozen=True, slots=True)
class ErasedOwner:
    """What was removed: how many named prefixes, blocks by model and tier; `missed` in words, and
    models `not_covered`, which run elsewhere."""

    named_prefixes: int
    models: Mapping[str, Mapping[str, Any]]
    missed: Sequence[str]
    not_covered: Sequence[str]


class CacheAdmin:
    """Handlers. Each needs the operator's key."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        models: Models,
        secret: bytes,
        recent: RecentRequests,
        named: NamedPrefixes | None,
    ) -> None:
        """`secret` is the server's, `named` None where there are no named prefixes."""
        self._runtime = runtime
        self._models = models
        self._secret = secret
        self._recent = recent
        self._named = named

    async def show(self, call: HttpCall) -> None:
        """Every model's tiers, and each tenant's share of them. `not_covered` names the models
        that run elsewhere."""
        snapshot = self._admitted(call)
        names = tenants_by_tag(self._secret, (tenant.id for tenant in snapshot.settings.tenants))
        await call.answer_json(
            {
                "models": {
                    name: stats_answer(model, names)
                    for name, model in self._models.served().items()
                },
                "not_covered": self._models.remote_names(),
            }
        )

    async def explain(self, call: HttpCall, request_id: str) -> None:
        """How each of a request's prompts met the cache; a 404 for one that is not remembered."""
        self._admitted(call)
        found = remembered(self._recent, request_id)
        await call.answer_json(
            {"request_id": request_id, "requests": [explained(recent) for recent in found]}
        )

    async def flush(self, call: HttpCall) -> None:
        """Remove every block of every model of our own, or of the one that `model` names."""
        self._admitted(call)
        models = self._models.served()
        query = call.query()
        refuse_unknown_parameters(query, ("model",))
        name = query.get("model")
        if name is not None:
            if name not in models:
                raise ApiError(
                    404, "There is no such model.", param="model", code="model_not_found"
                )
            models = {name: models[name]}
        removed = await _remove(models, lambda replica: replica.flush_cache())
        missed = _missed(removed)
        _log.info("cache flushed", model=name or "all", complete=not missed)
        elsewhere = self._models.remote_names() if name is None else []
        await answer_removal(call, {}, removed, missed, elsewhere)

    async def erase(self, call: HttpCall, tenant_id: str, user: str | None = None) -> None:
        """Remove a tenant's blocks and named prefixes, or one user's, from every tier of ours. What
        remote models may hold of it stays there; `not_covered` names them.

        A tenant that is not configured is a 404, so that a slip of the pen does not look like an
        erasure; `unknown=allow` erases one that has been removed from the configuration. A user of
        a tenant whose users share is a 409: what is shared cannot be told apart.
        """
        snapshot = self._admitted(call)
        query = call.query()
        refuse_unknown_parameters(query, ("unknown", "user") if user is None else ("unknown",))
        user = query.get("user") if user is None else user
        if user == "":
            raise bad_request("user must not be empty.", param="user")
        _require_erasable(snapshot, tenant_id, user, unknown=query.get("unknown"))
        erased = await self.erase_owner(tenant_id, user)
        whose = {"tenant": tenant_id, "user": user, "named_prefixes": erased.named_prefixes}
        await answer_removal(call, whose, erased.models, erased.missed, erased.not_covered)

    async def erase_owner(self, tenant_id: str, user: str | None = None) -> ErasedOwner:
        """Remove what a tenant, or one of its users, has in this gateway's tiers and in Redis."""
        # the names first: a prefix that is still kept by one would be computed again
        names = ErasedNames(0, complete=True)
        if self._named is not None:
            names = await self._named.erase_tenant(tenant_id, user)
        tags = owner_tags(self._secret, tenant_id, user)
        scope = None if user is None else tags.scope
        removed = await _remove(
            self._models.served(), lambda replica: replica.erase_cache(tags.tenant, scope)
        )
        missed = _missed(removed)
        if not names.complete:
            missed.append("named prefixes: Redis could not be asked")
        elsewhere = self._models.remote_names()
        _log.info(
            "cache erased",
            tenant=tenant_id,
            one_user=user is not None,
            complete=not missed,
            not_covered=elsewhere,
        )
        return ErasedOwner(names.names, removed, missed, elsewhere)

    def _admitted(self, call: HttpCall) -> Snapshot:
        snapshot = self._runtime.current
        require_operator(call, snapshot)
        return snapshot


def _require_erasable(
    snapshot: Snapshot, tenant_id: str, user: str | None, *, unknown: str | None
) -> None:
    if unknown not in (None, "allow"):
        raise bad_request("unknown must be allow, or be left out.", param="unknown")
    if not TENANT_ID.fullmatch(tenant_id):
        raise bad_request(f"The tenant's id {TENANT_ID_RULE}.")
    known = {tenant.id: tenant for tenant in snapshot.settings.tenants}.get(tenant_id)
    if known is None and unknown is None:
        raise ApiError(
            404,
            "No tenant of this id is configured; ?unknown=allow (`forebay cache erase --unknown`) "
            "erases one that was removed from the configuration.",
            code="tenant_not_found",
        )
    if known is not None and user is not None and known.cache.scope != "user":
        raise ApiError(
            409,
            f"This tenant's cache.scope is {known.cache.scope}: its users' prompts cannot be told "
            "apart. Erase the tenant.",
            param="user",
            code="users_not_separate",
        )


async def _remove(models: Mapping[str, ServedModel], removal: Removal) -> dict[str, dict[str, Any]]:
    """Do it in every model at once; blocks removed by tier, and "error" where one failed."""
    results = await asyncio.gather(
        *(_remove_from(name, model, removal) for name, model in models.items())
    )
    return dict(zip(models, results, strict=True))


async def _remove_from(name: str, model: ServedModel, removal: Removal) -> dict[str, Any]:
    try:
        async with asyncio.timeout(_REMOVAL_S):
            erased = await asyncio.gather(*(_removed(removal, r) for r in model.replicas))
    except TimeoutError:
        return {"error": f"was not done within {_REMOVAL_S:.0f} seconds"}
    except Exception:  # noqa: BLE001 - one model's failure must not hide what the others removed
        _log.exception("cache could not be removed", model=name)
        return {"error": "failed; the server's log says why"}
    asked = [each for each in erased if each is not None]
    if not asked:
        return {"error": "no replica could be asked, and Redis may hold blocks of it"}
    stats = [replica.cache_stats() for replica in model.replicas]
    return erased_answer(all_erased(asked), stats)


async def _removed(removal: Removal, replica: Replica) -> Erased | None:
    """None for a worker that is down: it has lost what it held, and its next life begins with
    nothing; what it shares through Redis is for others to remove."""
    try:
        return await removal(replica)
    except ReplicaUnavailable:
        if replica.health().condition is Condition.SERVING:
            raise
        return None


def all_erased(parts: Sequence[Erased]) -> Erased:
    """What was removed from all of a model's replicas. They share Redis: one that could ask it is
    enough."""
    redis = [part.redis for part in parts if part.redis is not None]
    return Erased(
        device=sum(part.device for part in parts),
        dram=sum(part.dram for part in parts),
        redis=sum(redis) if redis else None,
    )


def _missed(removed: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What was not reached, in words."""
    missed = []
    for name, tiers in removed.items():
        if "error" in tiers:
            missed.append(f"{name}: {tiers['error']}")
        elif tiers.get("redis", 0) is None:
            missed.append(f"{name}: Redis could not be asked")
    return missed


async def answer_removal(
    call: HttpCall,
    whose: Mapping[str, Any],
    removed: Mapping[str, Mapping[str, Any]],
    missed: Sequence[str],
    elsewhere: Sequence[str],
    *,
    again: str = "Ask again",
) -> None:
    """200 if nothing was missed; else a 503 that says what was done and, by `again`, that asking
    again is safe. The models `elsewhere` are none that asking again would reach: they are named,
    and are no part of what is complete."""
    answer = {
        **whose,
        "complete": not missed,
        "not_covered": list(elsewhere),
        "models": removed,
    }
    if not missed:
        await call.answer_json(answer)
        return
    error = unavailable(
        f"Not everything could be removed ({'; '.join(missed)}). {again}: what is gone stays gone.",
        code="cache_partly_removed",
        retry_after_s=_RETRY_AFTER_S,
    )
    await call.answer(
        error.status,
        orjson.dumps({**error.envelope(), **answer}),
        headers=[(name.encode(), value.encode()) for name, value in error.headers.items()],
    )
