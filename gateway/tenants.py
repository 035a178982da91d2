"""Who may come in: tenants, and the keys that name them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from gateway.errors import unauthorized

CacheScope = Literal["tenant", "user", "none"]


@dataclass(frozen=True, slots=True)
class TenantCache:
    """A tenant's part in the caches: within what its prompts share KV, and how much it may hold.

    Floors and quotas are bytes, per replica on the device and in DRAM, over the whole fleet in
    Redis. Others cannot push a tenant below its floor; a quota of None is none.
    """

    scope: CacheScope = "tenant"
    device_floor_bytes: int = 0
    device_quota_bytes: int | None = None
    dram_floor_bytes: int = 0
    dram_quota_bytes: int | None = None
    redis_quota_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant as the gateway enforces it.

    `models` are glob patterns of model names; `concurrency` is how many requests may be in flight
    at once (None: no limit). `sees_receipt` is whether its answers say in headers where they ran
    and how.
    """

    id: str
    models: tuple[str, ...]
    concurrency: int | None
    cache: TenantCache = TenantCache()
    sees_receipt: bool = True

    @property
    def cache_scope(self) -> CacheScope:
        """Within what the tenant's prompts share KV."""
        return self.cache.scope

    def may_use(self, model: str) -> bool:
        """Whether one of the tenant's patterns matches the model's name."""
        return any(fnmatchcase(model, pattern) for pattern in self.models)


def hash_key(key: str) -> str:
    """A key as it may lie in a file: "sha256:" and the hex digest. Keys are long and random, so a
    plain digest cannot be reversed by guessing."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """Every key of every tenant, hashed. Immutable: a reload builds another ring."""

    def __init__(self, keys: Iterable[tuple[str, Tenant]]) -> None:
        """`keys` pairs a `hash_key` string with its tenant. Raises ValueError on a duplicate."""
        self._tenant_by_digest: dict[bytes, Tenant] = {}
        for hashed, tenant in keys:
            digest = bytes.fromhex(hashed.removeprefix("sha256:"))
            if digest in self._tenant_by_digest:
                raise ValueError(f"tenant {tenant.id}: one of its keys is listed twice")
            self._tenant_by_digest[digest] = tenant

    def tenant(self, tenant_id: str) -> Tenant | None:
        """The tenant of this id."""
        return next((t for t in self._tenant_by_digest.values() if t.id == tenant_id), None)

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant of an `Authorization: Bearer KEY` header; raises a 401 ApiError otherwise.

        Every stored digest is compared in constant time, so that neither a near miss nor the
        number of tries before a hit can be told from the time taken.
        """
        if not authorization:
            raise unauthorized("No API key: send it as 'Authorization: Bearer KEY'.")
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise unauthorized("The Authorization header must read 'Bearer KEY'.")
        presented = hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).digest()
        found: Tenant | None = None
        for digest, tenant in self._tenant_by_digest.items():
            if hmac.compare_digest(digest, presented):
                found = tenant
        if found is None:
            raise unauthorized("This API key is not valid.")
        return found
