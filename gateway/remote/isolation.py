"""Tenants kept apart in the prompt caches of servers that are not ours.

What a client sends can only narrow inside its tenant: the salt that a server gets is a keyed digest
of tenant, scope and the client's own strings, so that nobody can name another's.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from typing import NamedTuple

from cache.hashing import chain_root
from gateway.remote.body import RelayBody
from gateway.tenants import Tenant

_SALT_TAG = b"forebay/remote-salt/1"
_REMEMBERED = 1 << 16


class CacheTerms(NamedTuple):
    """Where a request's prefix chain begins (None: it shares KV with nobody), and the salt under
    which servers keep it."""

    chain_root: bytes | None
    salt: str


class Isolation:
    """One model's tenants. Remembers the roots of a bounded number of salts."""

    def __init__(self, secret: bytes, tokenizer_identity: str) -> None:
        """`tokenizer_identity` is what the model's prefix chains are made of."""
        self._secret = secret
        self._identity = tokenizer_identity
        self._terms: OrderedDict[tuple[str, str], CacheTerms] = OrderedDict()
        self._root_of: dict[str, bytes] = {}

    def terms(self, tenant: Tenant, body: RelayBody) -> CacheTerms:
        """The request's terms. One that may share with nobody gets a salt of its own."""
        scope = scope_of(tenant, body.user, body.narrowing)
        if scope is None:
            return CacheTerms(None, secrets.token_hex(32))
        key = tenant.id, scope
        terms = self._terms.get(key)
        if terms is not None:
            self._terms.move_to_end(key)
            return terms
        root = chain_root(self._secret, tenant.id, scope, self._identity)
        terms = CacheTerms(root, _salt(self._secret, tenant.id, scope))
        self._terms[key] = terms
        self._root_of[terms.salt] = root
        if len(self._terms) > _REMEMBERED:
            _, oldest = self._terms.popitem(last=False)
            self._root_of.pop(oldest.salt, None)
        return terms

    def root_of(self, salt: str) -> bytes | None:
        """The root of the chains that are kept under a salt, if it was used lately."""
        return self._root_of.get(salt)


def scope_of(
    tenant: Tenant, user: str | None, narrowing: tuple[tuple[str, str], ...]
) -> str | None:
    """Within what a request shares KV inside its tenant, written as for the engines of our own;
    None: with nobody."""
    parts: list[tuple[str, str]] = []
    if tenant.cache_scope == "none":
        return None
    if tenant.cache_scope == "user":
        if user is None:
            return None
        parts.append(("user", user))
    parts += narrowing
    return "".join(f"{name}:{len(value)}:{value};" for name, value in parts)


def _salt(secret: bytes, tenant: str, scope: str) -> str:
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (_SALT_TAG, tenant.encode("utf-8", "surrogatepass"), scope.encode()):
        mac.update(len(part).to_bytes(8, "little"))
        mac.update(part)
    return mac.hexdigest()
