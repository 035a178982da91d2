"""Within what a request may share KV: always inside its tenant, often inside less."""

from __future__ import annotations

from dataclasses import dataclass

from cache.block import NOBODY, Owner
from cache.hashing import chain_root, owner_tags
from gateway.served_model import ServedModel
from gateway.tenants import Tenant
from gateway.wire.generation import Generation


@dataclass(frozen=True, slots=True)
class CacheTerms:
    """On what terms a request meets the cache: where its prefix chains begin and whose its blocks
    are. A `chain_root` of None: nothing of it is stored or read, its shared prefix included."""

    chain_root: bytes | None
    owner: Owner


_NOTHING_SHARED = CacheTerms(None, NOBODY)


def cache_terms(
    secret: bytes, tenant: Tenant, generation: Generation, model: ServedModel
) -> CacheTerms:
    """The request's terms under its tenant's scope.

    What a client sends can only narrow: its strings are tagged and length-prefixed inside a scope
    that lies inside the tenant. Where users are kept apart, a request that names none shares with
    nobody. Salts narrow the chain, not the owner: a user's erasure takes every salt's blocks.
    """
    user: str | None = None
    if tenant.cache_scope == "none":
        return _NOTHING_SHARED
    if tenant.cache_scope == "user":
        user = generation.user
        if user is None:
            return _NOTHING_SHARED
    parts = [] if user is None else [("user", user)]
    parts += generation.cache_salts
    scope = "".join(f"{name}:{len(value)}:{value};" for name, value in parts)
    return CacheTerms(
        chain_root(secret, tenant.id, scope, model.tokenizer.identity),
        owner_tags(secret, tenant.id, user),
    )
