"""/v1/caches: a tenant's named prefixes, made, listed, extended and deleted by itself."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import orjson

from cache.block import Owner, Tier
from cache.report import CacheStats
from gateway.delivery import engine_unavailable, run_to_end
from gateway.errors import bad_request
from gateway.http_body import read_body
from gateway.http_call import HttpCall
from gateway.http_disconnect import ends_with_client
from gateway.journey import Journey
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.named_cache import NamedCache, Place
from gateway.named_caches import Allowance, NamedCaches
from gateway.recent_requests import RecentRequests
from gateway.reload import RuntimeConfig
from gateway.replica import ReplicaUnavailable
from gateway.request import Request
from gateway.served_model import ServedModel
from gateway.settlement import settled
from gateway.tenancy import Tenancy
from gateway.tenants import Tenant
from gateway.unknown_fields import UnknownFields
from gateway.warming import conversation_of, warming_task
from gateway.wire.caches import (
    cache_card,
    cache_list,
    cache_not_found,
    deletion,
    read_extension,
    read_new_cache,
    run_card,
)
from gateway.wire.unknown_names import refuse_unknown_parameters

CACHES = "/v1/caches"
CACHE_PREFIX = CACHES + "/"
_ENDPOINT = "caches"
_STORED_BYTES_PER_TOKEN = 64
"""Of messages as JSON, for each token of the model's context. They stay in memory and in Redis, and
may hold much that no template shows."""


class CachesApi:
    """Answers every method of both paths."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        models: Models,
        metrics: Metrics,
        named: NamedCaches,
        journey: Journey,
        tenancy: Tenancy,
        recent: RecentRequests | None = None,
    ) -> None:
        """`journey` is who runs prefixes, `recent` remembers how each met the cache."""
        self._runtime = runtime
        self._models = models
        self._metrics = metrics
        self._named = named
        self._journey = journey
        self._tenancy = tenancy
        self._recent = recent
        self._unknown_fields = UnknownFields(metrics)

    async def create(self, call: HttpCall) -> None:
        """POST /v1/caches: run the prefix once and keep it under its name.

        201; 200 if there was the same already, which then lives longer.
        """
        request = self._request(call)
        with settled(request, self._metrics, self._tenancy, self._recent):
            tenant = request.authenticate()
            body = await self._body(request)
            async with AsyncExitStack() as scope:
                await scope.enter_async_context(ends_with_client(call))
                wanted = read_new_cache(body)
                self._unknown_fields.note(wanted.unknown)
                model = self._models.find_served(wanted.model, tenant)
                owner = self._owner(tenant, wanted.user)
                now_s = self._named.now_s()
                cache = NamedCache(
                    place=Place(owner, wanted.name),
                    model=model.name,
                    messages=tuple(wanted.conversation.messages),
                    tokens=0,
                    kv_bytes=0,
                    cached_tokens=0,
                    created_s=now_s,
                    expires_s=now_s + wanted.ttl_s,
                )
                if len(orjson.dumps(cache.messages)) > _STORED_BYTES_PER_TOKEN * model.max_context:
                    raise bad_request("messages is too long for a named prefix.", param="messages")
                before = await self._named.find(owner, wanted.name)
                same = before is not None and before.same_content(cache)
                if before is not None and same:
                    cache = extended(before, wanted.ttl_s, now_s)
                cache = await self._warm(request, cache, wanted.user, tenant, scope)
                card = run_card(cache, request.usage())
                await call.answer_json(card, status=200 if same else 201)

    async def extend(self, call: HttpCall) -> None:
        """POST /v1/caches/{name}: from now on it lives at least for `ttl` again."""
        request = self._request(call)
        with settled(request, self._metrics, self._tenancy, self._recent):
            tenant = request.authenticate()
            body = await self._body(request)
            async with AsyncExitStack() as scope:
                await scope.enter_async_context(ends_with_client(call))
                wanted = read_extension(body)
                user = wanted.user or _user_in_query(call)
                before = await self._find(call, tenant, user)
                cache = extended(before, wanted.ttl_s, self._named.now_s())
                cache = await self._warm(request, cache, user, tenant, scope)
                await call.answer_json(run_card(cache, request.usage()))

    async def show_all(self, call: HttpCall) -> None:
        """GET /v1/caches."""
        request = self._request(call)
        with settled(request, self._metrics):
            tenant = request.authenticate()
            owner = self._owner(tenant, _user_in_query(call))
            await call.answer_json(cache_list(await self._named.live(owner)))

    async def show_one(self, call: HttpCall) -> None:
        """GET /v1/caches/{name}."""
        request = self._request(call)
        with settled(request, self._metrics):
            tenant = request.authenticate()
            await call.answer_json(cache_card(await self._find(call, tenant, _user_in_query(call))))

    async def delete(self, call: HttpCall) -> None:
        """DELETE /v1/caches/{name}: the name is gone, its blocks are no longer anybody's charge."""
        request = self._request(call)
        with settled(request, self._metrics):
            tenant = request.authenticate()
            name = _name_in_path(call)
            if not await self._named.delete(self._owner(tenant, _user_in_query(call)), name):
                raise cache_not_found()
            await call.answer_json(deletion(name))

    def _request(self, call: HttpCall) -> Request:
        return Request(call, _ENDPOINT, self._runtime.current)

    async def _body(self, request: Request) -> bytearray:
        """What the call carries. Raises a 401 ApiError for a key that is not valid any more once
        all of it is there: a body may take as long to come as its client likes."""
        body = await read_body(request.call, request.snapshot.settings.server.body_limit)
        self._runtime.current.key_ring.require(request.caller)
        return body

    async def _find(self, call: HttpCall, tenant: Tenant, user: str | None) -> NamedCache:
        cache = await self._named.find(self._owner(tenant, user), _name_in_path(call))
        if cache is None:
            raise cache_not_found()
        return cache

    def _owner(self, tenant: Tenant, user: str | None) -> Owner:
        """Whose names are meant; raises a 400 where the tenant's prompts are shared with nobody, or
        where its users are kept apart and none is named."""
        if tenant.cache_scope == "none":
            raise bad_request("This tenant's prompts are not cached (cache.scope is none).")
        if tenant.cache_scope == "tenant":
            return self._named.owner(tenant.id, None)
        if user is None:
            raise bad_request(
                "user is required: this tenant's users do not share cached prompts.", param="user"
            )
        return self._named.owner(tenant.id, user)

    async def _warm(
        self,
        request: Request,
        cache: NamedCache,
        user: str | None,
        tenant: Tenant,
        scope: AsyncExitStack,
    ) -> NamedCache:
        """Run the prefix and store it with what the run has shown."""
        model = request.model = self._models.find_served(cache.model, tenant)
        self._journey.set_terms(request, tenant)
        self._journey.take_place(request, tenant, scope)
        lives_s = cache.expires_s - self._named.now_s()
        conversation = conversation_of(cache.messages)
        task = request.task = warming_task(conversation, model.name, user, lives_s)
        request.prompts = await task.encode(model)
        tokens = len(request.prompts[0].token_ids)
        blocks = tokens // model.kv_block_tokens
        cache = replace(cache, tokens=tokens, kv_bytes=blocks * model.kv_block_bytes)
        tenant_ids = [each.id for each in request.snapshot.settings.tenants]
        await self._named.load(cache.place.owner, tenant_ids)
        making = scope.enter_context(self._named.making(cache, allowance(tenant, model)))
        await self._journey.submit(request, task, tenant, model, scope)
        await run_to_end(request)
        self._runtime.current.key_ring.require(request.caller)
        cache = replace(cache, cached_tokens=request.usage().cached_tokens)
        await self._named.keep(making, cache)
        return cache


def extended(cache: NamedCache, ttl_s: float, now_s: float) -> NamedCache:
    """The same cache with at least `ttl_s` to live; never less than it had."""
    return replace(cache, expires_s=max(cache.expires_s, now_s + ttl_s))


def allowance(tenant: Tenant, model: ServedModel) -> Allowance:
    """What named prefixes may keep of this model's KV: the tenant's DRAM quota, else half of the
    DRAM tier (of the device's pool where there is no such tier) for all tenants together. Raises a
    503 ApiError while no replica can tell its size."""
    # a prefix is kept by the replica that ran it: what one replica has room for
    whole = max((_tier_bytes(replica.cache_stats()) for replica in model.replicas), default=0)
    if not whole:
        raise engine_unavailable(ReplicaUnavailable("No replica of this model can serve now."))
    return Allowance(tenant.cache.dram_quota_bytes, whole // 2)


def _tier_bytes(stats: CacheStats) -> int:
    """Of DRAM, or the device's pool where there is no such tier; 0 for a worker that is down."""
    size = {tier.tier: tier.total_bytes for tier in stats.tiers}
    return size.get(Tier.DRAM) or size.get(Tier.DEVICE, 0)


def _name_in_path(call: HttpCall) -> str:
    return call.path.removeprefix(CACHE_PREFIX)


def _user_in_query(call: HttpCall) -> str | None:
    query = call.query()
    refuse_unknown_parameters(query, ("user", "safety_identifier"))
    return query.get("safety_identifier") or query.get("user") or None
