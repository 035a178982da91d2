"""Which path under `/admin/` does what."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from gateway.admin.audit import Action, AuditAdmin, Audited, Handler
from gateway.admin.cache import CacheAdmin, NamedPrefixes
from gateway.admin.keys import KeyAdmin
from gateway.admin.replicas import ReplicaAdmin
from gateway.admin.requests import RequestAdmin
from gateway.admin.tenants import TenantAdmin
from gateway.database.opening import Transactions
from gateway.fleet_control import FleetControl
from gateway.http_call import HttpCall
from gateway.journey import Journey
from gateway.models import Models
from gateway.recent_requests import RecentRequests
from gateway.registry.audit import AuditTrail, Deed
from gateway.registry.registry import Registry
from gateway.reload import RuntimeConfig
from gateway.utilization_metrics import UtilizationCollector

PREFIX = "/admin/"

_TENANT = re.compile(r"/admin/tenants/([^/]+)")
_TENANT_CACHE = re.compile(r"/admin/tenants/([^/]+)/cache")
# paths come decoded, and a user may be named with slashes
_USER_CACHE = re.compile(r"/admin/tenants/([^/]+)/users/(.+)/cache", re.DOTALL)
_KEY = re.compile(r"/admin/keys/([A-Za-z0-9-]{1,64})")
_KEY_ROTATION = re.compile(r"/admin/keys/([A-Za-z0-9-]{1,64})/rotate")
_REQUEST_CACHE = re.compile(r"/admin/requests/(.+)/cache", re.DOTALL)
_REQUEST = re.compile(r"/admin/requests/(.+)", re.DOTALL)
_REPLICA_VERB = re.compile(r"/admin/replicas/(.+)/(drain|resume)", re.DOTALL)
_REPLICA = re.compile(r"/admin/replicas/(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _DryRun:
    """What is asked by POST and changes nothing."""

    handler: Handler


_Found = Mapping[str, Handler | Action | _DryRun]


class AdminRoutes:
    """The operator's part of the API. Whatever is not asked by GET is an action, and audited."""

    def __init__(
        self,
        audited: Audited,
        *,
        cache: CacheAdmin,
        requests: RequestAdmin,
        replicas: ReplicaAdmin,
        tenants: TenantAdmin,
        keys: KeyAdmin,
        audit: AuditAdmin,
        more: Mapping[str, Mapping[str, Handler]] = MappingProxyType({}),
    ) -> None:
        """`more` are further handlers by path and method."""
        self._audited = audited
        self._cache = cache
        self._requests = requests
        self._replicas = replicas
        self._tenants = tenants
        self._keys = keys
        self._audit = audit
        self._more = more

    def methods(self, path: str) -> Mapping[str, Handler] | None:
        """The handlers of a path by method; None if there is nothing at it."""
        found = self._found(path)
        if found is None:
            return None
        return {method: self._handler(path, method, what) for method, what in found.items()}

    def _handler(self, path: str, method: str, what: Handler | Action | _DryRun) -> Handler:
        if isinstance(what, Action):
            return partial(self._audited.carry_out, action=what)
        if isinstance(what, _DryRun):
            return what.handler
        if method == "GET":
            return what
        unnamed = Action(f"{method.lower()} {path}", "", _without_deed(what))
        return partial(self._audited.carry_out, action=unnamed)

    def _found(self, path: str) -> _Found | None:
        return (
            self._more.get(path)
            or self._cache_paths(path)
            or self._request_paths(path)
            or self._replica_paths(path)
            or self._tenant_paths(path)
        )

    def _cache_paths(self, path: str) -> _Found | None:
        cache = self._cache
        if path == "/admin/cache":
            return {"GET": cache.show}
        if path == "/admin/cache/flush":
            return {"POST": Action("cache.flush", "", _without_deed(cache.flush))}
        if found := _TENANT_CACHE.fullmatch(path):
            erase = partial(cache.erase, tenant_id=found[1])
            return {"DELETE": Action("cache.erase", found[1], _without_deed(erase))}
        if found := _USER_CACHE.fullmatch(path):
            return {
                "DELETE": Action(
                    "cache.erase_user",
                    found[1],  # and not the user, who is to be named nowhere
                    _without_deed(partial(cache.erase, tenant_id=found[1], user=found[2])),
                )
            }
        return None

    def _request_paths(self, path: str) -> _Found | None:
        if found := _REQUEST_CACHE.fullmatch(path):
            return {"GET": partial(self._cache.explain, request_id=found[1])}
        if found := _REQUEST.fullmatch(path):
            return {"GET": partial(self._requests.show, request_id=found[1])}
        if path == "/admin/route/explain":
            return {"POST": _DryRun(self._requests.explain)}
        return None

    def _replica_paths(self, path: str) -> _Found | None:
        replicas = self._replicas
        if path == "/admin/replicas":
            return {"GET": replicas.show_all, "POST": Action("replica.add", "", replicas.add)}
        # names hold slashes: what is done to a replica comes first
        if found := _REPLICA_VERB.fullmatch(path):
            verb = replicas.drain if found[2] == "drain" else replicas.resume
            do = _without_deed(partial(verb, name=found[1]))
            return {"POST": Action(f"replica.{found[2]}", found[1], do)}
        if found := _REPLICA.fullmatch(path):
            remove = _without_deed(partial(replicas.remove, name=found[1]))
            return {
                "GET": partial(replicas.show_one, name=found[1]),
                "DELETE": Action("replica.remove", found[1], remove),
            }
        return None

    def _tenant_paths(self, path: str) -> _Found | None:
        tenants, keys = self._tenants, self._keys
        if path == "/admin/tenants":
            return {
                "GET": tenants.show_all,
                "POST": Action("tenant.create", "", tenants.create),
            }
        if found := _TENANT.fullmatch(path):
            name = found[1]
            return {
                "GET": partial(tenants.show_one, tenant_id=name),
                "PATCH": Action("tenant.update", name, partial(tenants.change, tenant_id=name)),
                "DELETE": Action("tenant.delete", name, partial(tenants.delete, tenant_id=name)),
            }
        if path == "/admin/keys":
            return {"GET": keys.show_all, "POST": Action("key.create", "", keys.create)}
        if found := _KEY_ROTATION.fullmatch(path):
            rotate = partial(keys.rotate, key_id=found[1])
            return {"POST": Action("key.rotate", found[1], rotate)}
        if found := _KEY.fullmatch(path):
            name = found[1]
            return {
                "GET": partial(keys.show_one, key_id=name),
                "PATCH": Action("key.update", name, partial(keys.change, key_id=name)),
                "DELETE": Action("key.revoke", name, partial(keys.revoke, key_id=name)),
            }
        if path == "/admin/audit":
            return {"GET": self._audit.show}
        return None


def make_admin(
    runtime: RuntimeConfig,
    models: Models,
    secret: bytes,
    recent: RecentRequests,
    named: NamedPrefixes | None,
    journey: Journey,
    control: FleetControl,
    database: Transactions,
    registry: Registry,
    trail: AuditTrail,
    utilization: UtilizationCollector,
    more: Mapping[str, Mapping[str, Handler]] = MappingProxyType({}),
) -> AdminRoutes:
    """All of it. A tenant that another gateway deletes is erased from this one's cache too."""
    cache = CacheAdmin(runtime, models, secret, recent, named)
    registry.on_gone(cache.erase_owner)
    return AdminRoutes(
        Audited(runtime, trail, secret),
        cache=cache,
        requests=RequestAdmin(runtime, recent, journey),
        replicas=ReplicaAdmin(runtime, models, control, utilization),
        tenants=TenantAdmin(runtime, registry, database, trail, cache),
        keys=KeyAdmin(runtime, registry),
        audit=AuditAdmin(runtime, trail),
        more=more,
    )


def _without_deed(handler: Handler) -> Callable[[HttpCall, Deed], Awaitable[None]]:
    """A handler that has no more to say of what it does than its path does."""

    async def do(call: HttpCall, _deed: Deed) -> None:
        await handler(call)

    return do
