"""Within what a request may share KV: always inside its tenant, often inside less."""

from __future__ import annotations

from cache.hashing import chain_root
from gateway.served_model import ServedModel
from gateway.tenants import Tenant
from gateway.wire.generation import Generation


def request_chain_root(
    secret: bytes, tenant: Tenant, generation: Generation, model: ServedModel
) -> bytes | None:
    """The root of the request's prefix chain, None where nothing may be shared.

    What a client sends can only narrow: its strings are tagged and length-prefixed inside a scope
    that lies inside the tenant. Where users are kept apart, a request that names none shares with
    nobody.
    """
    parts: list[tuple[str, str]] = []
    if tenant.cache_scope == "none":
        return None
    if tenant.cache_scope == "user":
        if generation.user is None:
            return None
        parts.append(("user", generation.user))
    parts += generation.cache_salts
    scope = "".join(f"{name}:{len(value)}:{value};" for name, value in parts)
    return chain_root(secret, tenant.id, scope, model.tokenizer.identity)
