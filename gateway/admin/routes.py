"""Which path under `/admin/` does what."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from gateway.admin.cache import CacheAdmin
from gateway.admin.replicas import ReplicaAdmin
from gateway.admin.requests import RequestAdmin
from gateway.http_call import HttpCall

PREFIX = "/admin/"

Handler = Callable[[HttpCall], Awaitable[None]]

_TENANT_CACHE = re.compile(r"/admin/tenants/([^/]+)/cache")
# paths come decoded, and a user may be named with slashes
_USER_CACHE = re.compile(r"/admin/tenants/([^/]+)/users/(.+)/cache", re.DOTALL)
_REQUEST_CACHE = re.compile(r"/admin/requests/(.+)/cache", re.DOTALL)
_REQUEST = re.compile(r"/admin/requests/(.+)", re.DOTALL)
_REPLICA_VERB = re.compile(r"/admin/replicas/(.+)/(drain|resume)", re.DOTALL)
_REPLICA = re.compile(r"/admin/replicas/(.+)", re.DOTALL)


def admin_methods(
    path: str, cache: CacheAdmin, requests: RequestAdmin, replicas: ReplicaAdmin
) -> Mapping[str, Handler] | None:
    """The handlers of a path by method; None if there is nothing at it."""
    if path == "/admin/cache":
        return {"GET": cache.show}
    if path == "/admin/cache/flush":
        return {"POST": cache.flush}
    if found := _REQUEST_CACHE.fullmatch(path):
        return {"GET": partial(cache.explain, request_id=found[1])}
    if found := _REQUEST.fullmatch(path):
        return {"GET": partial(requests.show, request_id=found[1])}
    if path == "/admin/route/explain":
        return {"POST": requests.explain}
    if path == "/admin/replicas":
        return {"GET": replicas.show_all, "POST": replicas.add}
    # names hold slashes: what is done to a replica comes first
    if found := _REPLICA_VERB.fullmatch(path):
        verb = replicas.drain if found[2] == "drain" else replicas.resume
        return {"POST": partial(verb, name=found[1])}
    if found := _REPLICA.fullmatch(path):
        return {
            "GET": partial(replicas.show_one, name=found[1]),
            "DELETE": partial(replicas.remove, name=found[1]),
        }
    if found := _TENANT_CACHE.fullmatch(path):
        return {"DELETE": partial(cache.erase, tenant_id=found[1])}
    if found := _USER_CACHE.fullmatch(path):
        return {"DELETE": partial(cache.erase, tenant_id=found[1], user=found[2])}
    return None
