"""Within what a request may share KV: always inside its tenant, often inside less."""

from __future__ import annotations

from collections.abc import Iterable
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
    scope = scope_of(tenant, generation.user, generation.cache_salts)
    if scope is None:
        return _NOTHING_SHARED
    user = generation.user if tenant.cache_scope == "user" else None
    return CacheTerms(
        chain_root(secret, tenant.id, scope, model.tokenizer.identity),
        owner_tags(secret, tenant.id, user),
    )


def scope_of(tenant: Tenant, user: str | None, narrowing: Iterable[tuple[str, str]]) -> str | None:
    """Within what a request shares KV inside its tenant: its own strings, each with its name and
    length; None: with nobody."""
    parts: list[tuple[str, str]] = []
    if tenant.cache_scope == "none":
        return None
    if tenant.cache_scope == "user":
        if user is None:
            return None
        parts.append(("user", user))
    parts += narrowing
    return "".join(f"{name}:{len(value)}:{value};" for name, value in parts)
