"""Which path under `/admin/` does what."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from gateway.admin.cache import CacheAdmin
from gateway.http_call import HttpCall

PREFIX = "/admin/"

Handler = Callable[[HttpCall], Awaitable[None]]

_TENANT_CACHE = re.compile(r"/admin/tenants/([^/]+)/cache")
# paths come decoded, and a user may be named with slashes
_USER_CACHE = re.compile(r"/admin/tenants/([^/]+)/users/(.+)/cache", re.DOTALL)
_REQUEST_CACHE = re.compile(r"/admin/requests/(.+)/cache", re.DOTALL)


def admin_methods(path: str, cache: CacheAdmin) -> Mapping[str, Handler] | None:
    """The handlers of a path by method; None if there is nothing at it."""
    if path == "/admin/cache":
        return {"GET": cache.show}
    if path == "/admin/cache/flush":
        return {"POST": cache.flush}
    if found := _REQUEST_CACHE.fullmatch(path):
        return {"GET": partial(cache.explain, request_id=found[1])}
    if found := _TENANT_CACHE.fullmatch(path):
        return {"DELETE": partial(cache.erase, tenant_id=found[1])}
    if found := _USER_CACHE.fullmatch(path):
        return {"DELETE": partial(cache.erase, tenant_id=found[1], user=found[2])}
    return None
