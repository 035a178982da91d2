"""Tenants kept apart in the prompt caches of servers that are not ours.

What a client sends can only narrow inside its tenant: the salt that a server gets is a keyed digest
of tenant, scope and the client's own strings, so that nobody can name another's.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cache.hashing import chain_root
from gateway.cache_scope import scope_of
from gateway.remote.body import RelayBody
from gateway.tenants import Tenant

_SALT_TAG = b"forebay/remote-salt/1"
_REMEMBERED = 1 << 16
_UNDIVIDED = 1 << 12


class CacheTerms(NamedTuple):
    """Where a request's prefix chain begins (None: it shares KV with nobody), and the salt under
    which servers keep it."""

    chain_root: bytes | None
    salt: str


class Isolation:
    """One model's tenants. Remembers the roots of a bounded number of salts, and nothing of what
    clients sent: their strings may be as long as a body."""

    def __init__(self, secret: bytes, tokenizer_identity: str) -> None:
        """`tokenizer_identity` is what the model's prefix chains are made of."""
        self._secret = secret
        self._identity = tokenizer_identity
        self._root_of: OrderedDict[str, bytes] = OrderedDict()
        self._expected: Mapping[str, bytes] = {}
        self._undivided: dict[str, str] = {}
        """Salts of whole tenants, by their names: what most requests get."""

    def terms(self, tenant: Tenant, body: RelayBody) -> CacheTerms:
        """The request's terms. One that may share with nobody gets a salt of its own."""
        scope = scope_of(tenant, body.user, body.narrowing)
        if scope is None:
            return CacheTerms(None, secrets.token_hex(32))
        salt = self._salt_of(tenant.id, scope)
        root = self._root_of.get(salt)
        if root is not None:
            self._root_of.move_to_end(salt)
            return CacheTerms(root, salt)
        root = self._root_of[salt] = chain_root(self._secret, tenant.id, scope, self._identity)
        if len(self._root_of) > _REMEMBERED:
            self._root_of.popitem(last=False)
        return CacheTerms(root, salt)

    def expect(self, tenants: Iterable[str]) -> None:
        """Know the salts of these tenants' undivided prompts, and no others', before they are used:
        servers may hold such prompts since before this gateway began, or for another one."""
        self._expected = {
            self._salt_of(tenant, ""): chain_root(self._secret, tenant, "", self._identity)
            for tenant in tenants
        }

    def root_of(self, salt: str) -> bytes | None:
        """The root of the chains that are kept under a salt, if it was used lately or is
        expected."""
        return self._root_of.get(salt) or self._expected.get(salt)

    def _salt_of(self, tenant: str, scope: str) -> str:
        if scope:
            return _salt(self._secret, tenant, scope)
        salt = self._undivided.get(tenant)
        if salt is None:
            if len(self._undivided) >= _UNDIVIDED:
                self._undivided.clear()
            salt = self._undivided[tenant] = _salt(self._secret, tenant, scope)
        return salt


def _salt(secret: bytes, tenant: str, scope: str) -> str:
    parts = (_SALT_TAG, tenant.encode("utf-8", "surrogatepass"), scope.encode())
    said = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(secret, said, hashlib.sha256).hex()
