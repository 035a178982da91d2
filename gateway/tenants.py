"""Who may come in: tenants, and the keys that name them."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from gateway.errors import unauthorized
from policies.limits import NO_LIMITS, Limits
from policies.service_class import ServiceClass
from policies.slo import NO_SLO, Slo

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

    `models` are glob patterns of model names. `model_limits` are further ceilings by a model's own
    name; a cached token counts as `cached_weight` of one against limits; `enqueued_tokens` is what
    its batches may hold that has not run (None: no limit). `sees_receipt` is whether its answers
    say in headers where they ran and how.
    """

    id: str
    models: tuple[str, ...] = ("*",)
    limits: Limits = NO_LIMITS
    cache: TenantCache = TenantCache()
    sees_receipt: bool = True
    service_class: ServiceClass = ServiceClass.STANDARD
    weight: float = 1.0
    slo: Slo = NO_SLO
    model_limits: Mapping[str, Limits] = field(default_factory=dict)
    cached_weight: float = 0.1
    enqueued_tokens: int | None = None

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


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """What is known of a key beside its hash. `id` is no secret and names it in limits, the ledger
    and the operator's API. `expires_s` is a Unix time; None: it does not expire."""

    id: str
    limits: Limits = NO_LIMITS
    expires_s: float | None = None

    def expired(self, now_s: float) -> bool:
        """Whether it lets nobody in any more."""
        return self.expires_s is not None and now_s >= self.expires_s


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a tenant, by one of its keys."""

    tenant: Tenant
    key: KeyFacts


def key_id(hashed: str) -> str:
    """The id of a key that nobody has named: the beginning of its hash, from which neither the key
    nor the hash can be told."""
    return "key-" + hashed.removeprefix("sha256:")[:12]


class KeyRing:
    """Every key of every tenant, hashed. Immutable: a reload builds another ring."""

    def __init__(
        self,
        keys: Iterable[tuple[str, Tenant] | tuple[str, Tenant, KeyFacts]],
        tenants: Iterable[Tenant] = (),
    ) -> None:
        """`keys` pairs a `hash_key` string with its tenant, and what else is known of the key.
        `tenants` are all of them, those without a key too. Raises ValueError on a duplicate."""
        # looked up under a key of this process's own, a near miss takes as long as any other
        self._pepper = secrets.token_bytes(32)
        self._caller_by_tag: dict[bytes, tuple[bytes, Caller]] = {}
        self._caller_by_id: dict[str, Caller] = {}
        self._tenants = {tenant.id: tenant for tenant in tenants}
        for hashed, tenant, *rest in keys:
            self._add(hashed, tenant, rest[0] if rest else KeyFacts(key_id(hashed)))

    def joined(
        self, keys: Iterable[tuple[str, Tenant, KeyFacts]], tenants: Iterable[Tenant]
    ) -> KeyRing:
        """Another ring, with these as well. Raises ValueError on a duplicate."""
        ring = KeyRing((), [*self._tenants.values(), *tenants])
        ring._pepper = self._pepper
        ring._caller_by_tag = dict(self._caller_by_tag)
        ring._caller_by_id = dict(self._caller_by_id)
        for hashed, tenant, facts in keys:
            ring._add(hashed, tenant, facts)
        return ring

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """All of them, by id."""
        return self._tenants

    def tenant(self, tenant_id: str) -> Tenant | None:
        """The tenant of this id."""
        return self._tenants.get(tenant_id)

    @property
    def callers(self) -> Mapping[str, Caller]:
        """Everybody who may come in, by the id of the key."""
        return self._caller_by_id

    def has(self, hashed: str) -> bool:
        """Whether this `hash_key` string is one of the ring's."""
        return self._tag(_digest(hashed)) in self._caller_by_tag

    def caller(self, key: str) -> Caller | None:
        """Who has the key of this id, while it is valid: for work that goes on after its request
        is over."""
        caller = self._caller_by_id.get(key)
        return None if caller is None or caller.key.expired(time.time()) else caller

    def require(self, caller: Caller | None) -> None:
        """Raises a 401 ApiError unless the caller could come in now too: for what is to be kept of
        a request that has taken long."""
        if caller is None or self.caller(caller.key.id) is None:
            raise unauthorized("This API key is not valid any more.")

    def identify(self, authorization: str | None) -> Caller:
        """Whose key an `Authorization: Bearer KEY` header carries; raises a 401 ApiError.

        The digest of what was sent is looked up by a MAC under a secret of this process's, and
        compared in constant time: the time taken tells nothing of the digests that are stored.
        """
        if not authorization:
            raise unauthorized("No API key: send it as 'Authorization: Bearer KEY'.")
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise unauthorized("The Authorization header must read 'Bearer KEY'.")
        presented = hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).digest()
        digest, caller = self._caller_by_tag.get(self._tag(presented), (b"", None))
        if caller is None or not hmac.compare_digest(digest, presented):
            raise unauthorized("This API key is not valid.")
        if caller.key.expired(time.time()):
            raise unauthorized("This API key is not valid.")
        return caller

    def _add(self, hashed: str, tenant: Tenant, facts: KeyFacts) -> None:
        digest = _digest(hashed)
        tag = self._tag(digest)
        if tag in self._caller_by_tag:
            raise ValueError(f"tenant {tenant.id}: one of its keys is listed twice")
        caller = Caller(tenant, facts)
        self._caller_by_tag[tag] = (digest, caller)
        self._caller_by_id[facts.id] = caller
        self._tenants.setdefault(tenant.id, tenant)

    def _tag(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._pepper).digest()


def _digest(hashed: str) -> bytes:
    return bytes.fromhex(hashed.removeprefix("sha256:"))
