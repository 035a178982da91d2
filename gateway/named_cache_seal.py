"""Records of named prefixes as Redis holds them: sealed, and bound to their place."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import orjson

from cache.block import TAG_BYTES, Owner
from cache.sealing import NONCE_BYTES, Sealer
from gateway.named_cache import NamedCache, Place, Record

_KEY_TAG = b"forebay/named-caches/1"
_VERSION = b"\x01"


def field_of(place: Place) -> str:
    """A name's field in its tenant's hash."""
    return f"{place.owner.scope.hex()}:{place.name}"


class RecordSealer:
    """AES-256-GCM under a key of its own, derived from the server's secret.

    Key and field are bound in, so that a value copied to another tenant, user or name opens for
    nobody.
    """

    def __init__(self, secret: bytes) -> None:
        self._sealer = Sealer(hmac.digest(secret, _KEY_TAG, hashlib.sha256))

    def seal(self, key: str, field: str, record: Record) -> bytes:
        """Version, nonce, sealed JSON."""
        nonce = self._sealer.nonce()
        plain = orjson.dumps(_as_json(record))
        return _VERSION + nonce + self._sealer.seal(nonce, plain, _bound(key, field))

    def open(self, key: str, field: str, value: bytes, tenant: bytes) -> Record | None:
        """The record that was sealed for this key and field, None if this is none."""
        start = len(_VERSION) + NONCE_BYTES
        if not value.startswith(_VERSION) or len(value) <= start:
            return None
        nonce, sealed = value[len(_VERSION) : start], value[start:]
        plain = self._sealer.open(nonce, sealed, _bound(key, field))
        if plain is None:
            return None
        scope, _, name = field.partition(":")
        owner = Owner(tenant, bytes.fromhex(scope))
        if len(owner.scope) != TAG_BYTES:
            return None
        return _from_json(Place(owner, name), orjson.loads(plain))


def _bound(key: str, field: str) -> bytes:
    return f"{key}\0{field}".encode()


def _as_json(record: Record) -> dict[str, object]:
    cache = record.cache
    if cache is None:
        return {"changed_s": record.changed_s, "expires_s": record.expires_s}
    return {
        "changed_s": record.changed_s,
        "expires_s": record.expires_s,
        "model": cache.model,
        "messages": cache.messages,
        "tokens": cache.tokens,
        "kv_bytes": cache.kv_bytes,
        "cached_tokens": cache.cached_tokens,
        "created_s": cache.created_s,
    }


def _from_json(place: Place, values: dict[str, Any]) -> Record:
    """What was sealed here is what `_as_json` wrote: nothing else has the key."""
    changed_s, expires_s = values["changed_s"], values["expires_s"]
    if "messages" not in values:
        return Record(place, changed_s, expires_s, None)
    cache = NamedCache(
        place=place,
        model=values["model"],
        messages=tuple(values["messages"]),
        tokens=values["tokens"],
        kv_bytes=values["kv_bytes"],
        cached_tokens=values["cached_tokens"],
        created_s=values["created_s"],
        expires_s=expires_s,
    )
    return Record(place, changed_s, expires_s, cache)
