"""Named prefixes: who has which, until when, and how much may be kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from cache.block import Owner
from cache.hashing import owner_tags
from gateway.errors import ApiError, bad_request
from gateway.named_cache import NamedCache, Place, Record, deleted, stored
from gateway.named_cache_store import NamedCacheStore

MAX_NAMES = 100
"""Of one tenant, its users' together."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many bytes of one model's KV named prefixes may keep.

    `quota_bytes` is for the tenant's own; None: it shares `shared_bytes` with every other tenant.
    """

    quota_bytes: int | None
    shared_bytes: int


class ErasedNames(NamedTuple):
    """How many names there were, as far as is known, and whether the store has forgotten them too:
    Redis still holds their messages where it could not be asked."""

    names: int
    complete: bool


@dataclass(frozen=True, slots=True, eq=False)
class Making:
    """A name that is held while its prefix is computed. `before` is what was known of it when that
    began."""

    cache: NamedCache
    before: Record | None


class NamedCaches:
    """Every tenant's names. Event loop only; the store is the truth, what is being made beside it.

    A method that may need the store is a coroutine; between its awaits nothing is half done.
    """

    def __init__(
        self, store: NamedCacheStore, secret: bytes, *, clock: Callable[[], float] = time.time
    ) -> None:
        """`secret` is the server's, `clock` gives Unix seconds."""
        self._store = store
        self._secret = secret
        self._clock = clock
        self._making: dict[Place, Making] = {}
        self._loaded: set[bytes] = set()

    def now_s(self) -> float:
        """Unix seconds."""
        return self._clock()

    def owner(self, tenant_id: str, user: str | None) -> Owner:
        """Whose names a tenant's are; `user` only where its users are kept apart."""
        return owner_tags(self._secret, tenant_id, user)

    async def live(self, owner: Owner) -> list[NamedCache]:
        """The owner's caches that have not expired, by name."""
        now_s = self._clock()
        await self._store.refresh(owner.tenant, now_s)
        found = [cache for cache in self._live(now_s) if cache.place.owner == owner]
        return sorted(found, key=lambda cache: cache.place.name)

    async def kept_by(self, tenant_ids: Iterable[str]) -> dict[str, list[NamedCache]] | None:
        """What each of these tenants keeps, all its users' together; None where the store cannot
        be asked, and what is known may be old."""
        kept: dict[str, list[NamedCache]] = {}
        for tenant_id in tenant_ids:
            tenant = self.owner(tenant_id, None).tenant
            if not await self._store.refresh(tenant, self._clock()):
                return None
            live = self._live(self._clock())
            kept[tenant_id] = [cache for cache in live if cache.place.owner.tenant == tenant]
        return kept

    async def find(self, owner: Owner, name: str) -> NamedCache | None:
        """The owner's cache of this name, None if there is none or it has expired."""
        now_s = self._clock()
        place = Place(owner, name)
        await self._store.look_up(place, now_s)
        return _live_cache(self._store.copy.get(place), now_s)

    async def load(self, owner: Owner, tenant_ids: list[str]) -> None:
        """Bring what the owner's tenant holds up to date, since another gateway may have added to
        it, and make sure that these tenants' has been asked for once: it counts for others."""
        self._loaded.discard(owner.tenant)
        for tenant_id in tenant_ids:
            tenant = self.owner(tenant_id, None).tenant
            if tenant not in self._loaded and await self._store.refresh(tenant, self._clock()):
                self._loaded.add(tenant)

    @contextmanager
    def making(self, cache: NamedCache, allowance: Allowance) -> Iterator[Making]:
        """Hold a name and its bytes while the prefix is computed; `keep` it before leaving.

        Raises ApiError: 409 where the name is taken by other content or being made, where the
        tenant has too many, or where it does not fit beside what there is; 400 where it can never
        fit.
        """
        self._require_room(cache, allowance)
        place = cache.place
        making = self._making[place] = Making(cache, self._store.copy.get(place))
        try:
            yield making
        finally:
            if self._making.get(place) is making:
                del self._making[place]

    async def keep(self, making: Making, cache: NamedCache) -> None:
        """Store what `making` held, as it is now; a 409 if it was deleted meanwhile, here or by
        another gateway, or its tenant was erased: what was taken away must not come back."""
        place = making.cache.place
        await self._store.look_up(place, self._clock())
        known = self._store.copy.get(place)
        if self._making.get(place) is not making or _was_deleted(known, making.before):
            raise ApiError(
                409,
                "The name was deleted, or the tenant's cache erased, while this was made.",
                code="cache_erased",
            )
        now_s = self._clock()
        await self._store.write([stored(cache, now_s, known)], now_s)

    async def delete(self, owner: Owner, name: str) -> bool:
        """Forget a name; False if there was none."""
        if await self.find(owner, name) is None:
            return False
        await self._delete([Place(owner, name)])
        return True

    async def erase_tenant(self, tenant_id: str, user: str | None) -> ErasedNames:
        """Forget every name of a tenant, or of one of its users.

        What is being made is given up too.
        """
        owner = self.owner(tenant_id, user)
        await self._store.refresh(owner.tenant, self._clock())

        def is_theirs(place: Place) -> bool:
            return place.owner == owner or (user is None and place.owner.tenant == owner.tenant)

        for place in [place for place in self._making if is_theirs(place)]:
            del self._making[place]
        places = [cache.place for cache in self._live(self._clock()) if is_theirs(cache.place)]
        await self._delete(places)
        return ErasedNames(len(places), await self._store.refresh(owner.tenant, self._clock()))

    async def _delete(self, places: list[Place]) -> None:
        now_s = self._clock()
        for place in places:
            self._making.pop(place, None)
        known = [record for place in places if (record := self._store.copy.get(place)) is not None]
        await self._store.write([deleted(record, now_s) for record in known], now_s)

    def _live(self, now_s: float) -> list[NamedCache]:
        records = self._store.copy.all()
        return [cache for record in records if (cache := _live_cache(record, now_s)) is not None]

    def _require_room(self, wanted: NamedCache, allowance: Allowance) -> None:
        place = wanted.place
        if place in self._making:
            raise _exists("A cache of this name is being made; try again when it is done.")
        others = {cache.place: cache for cache in self._live(self._clock())}
        others |= {making: held.cache for making, held in self._making.items()}
        current = others.pop(place, None)
        if current is not None and not current.same_content(wanted):
            raise _exists("There is a cache of this name with another content; delete it first.")
        tenant = place.owner.tenant
        own = [other for other in others.values() if other.place.owner.tenant == tenant]
        if len(own) >= MAX_NAMES:
            raise ApiError(
                409,
                f"A tenant may have {MAX_NAMES} named prefixes; delete one, or let its ttl end.",
                param="name",
                code="too_many_caches",
            )
        held = own if allowance.quota_bytes is not None else list(others.values())
        taken = sum(other.kv_bytes for other in held if other.model == wanted.model)
        _require_fit(wanted.kv_bytes, taken, allowance)


def _require_fit(wanted: int, taken: int, allowance: Allowance) -> None:
    quota = allowance.quota_bytes
    if quota is not None:
        limit = quota
        whose = f"this tenant's dram_quota of {limit} bytes ({taken} of them taken)"
    else:
        # how much others have taken is theirs to know
        limit = allowance.shared_bytes
        whose = f"the {limit} bytes that all tenants' named prefixes of this model may keep"
    if wanted > limit:
        raise bad_request(
            f"This prefix takes {wanted} bytes of cache, more than {whose}.",
            param="messages",
            code="cache_quota_exceeded",
        )
    if taken + wanted > limit:
        raise ApiError(
            409,
            f"This prefix takes {wanted} bytes of cache and does not fit into {whose}. "
            "Delete a named prefix, or wait until a ttl ends.",
            param="messages",
            code="cache_quota_exceeded",
        )


def _exists(message: str) -> ApiError:
    return ApiError(409, message, param="name", code="cache_exists")


def _was_deleted(known: Record | None, before: Record | None) -> bool:
    """Whether the last change that is `known` of a name is a deletion since `before`."""
    if known is None or known.cache is not None:
        return False
    return before is None or known.outdoes(before)


def _live_cache(record: Record | None, now_s: float) -> NamedCache | None:
    if record is None or record.expires_s <= now_s:
        return None
    return record.cache
