"""One forebay speaking for a tenant of its own to another.

The header `x-forebay-peer` says whose request it is, sealed under the secret that both servers
share: `1.TENANT.SCOPE.TIME.NONCE.SEAL`, the tenant in URL-safe base64, the time in Unix seconds,
the nonce and the seal in hex. The seal is an HMAC-SHA256 over all of it, the request's id and the
SHA-256 of its body, so that neither can be put to another's use.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import get_args

from gateway.errors import ApiError, unauthorized
from gateway.http_call import HttpCall
from gateway.tenants import CacheScope

HEADER = "x-forebay-peer"
CLOCKS_APART_S = 120
_VERSION = "1"
_TAG = b"forebay/peer/1"
_LONGEST = 2048
_TIME = re.compile(r"[0-9]{1,12}")
_NONCE = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class PeerTenant:
    """Whose request it is at the peer that sent it, and within what its prompts share KV."""

    id: str
    cache_scope: CacheScope


def sign(
    secret: bytes, tenant: PeerTenant, *, request_id: str, body: bytes | bytearray, now_s: float
) -> str:
    """The header's value, good for one request and about two minutes."""
    name = base64.urlsafe_b64encode(tenant.id.encode("utf-8", "surrogatepass")).decode()
    said = ".".join((_VERSION, name, tenant.cache_scope, str(int(now_s)), secrets.token_hex(8)))
    return f"{said}.{_seal(secret, said, request_id, body)}"


def peer_tenant(
    call: HttpCall, body: bytes | bytearray, secret: bytes, now_s: float
) -> PeerTenant | None:
    """Who the peer speaks for; None for a call without the header.

    Raises a 401 ApiError for a header that this server's secret did not seal, that belongs to
    another request, or that is too old or from the future.
    """
    value = call.header(HEADER)
    if value is None:
        return None
    if len(value) > _LONGEST:
        raise _not_trusted()
    said, _, seal = value.rpartition(".")
    expected = _seal(secret, said, call.header("x-request-id") or "", body)
    if not hmac.compare_digest(seal.encode("latin-1", "replace"), expected.encode()):
        raise _not_trusted()
    tenant, sent_s = _parse(said)
    if abs(now_s - sent_s) > CLOCKS_APART_S:
        raise _not_trusted()
    return tenant


def _parse(said: str) -> tuple[PeerTenant, int]:
    """Of a value whose seal is right; another version's may still be unreadable."""
    match said.split("."):
        case [version, name, scope, time, nonce] if (
            version == _VERSION and _TIME.fullmatch(time) and _NONCE.fullmatch(nonce)
        ):
            try:
                tenant = base64.urlsafe_b64decode(name).decode("utf-8", "surrogatepass")
            except (binascii.Error, ValueError):
                raise _not_trusted() from None
            for known in get_args(CacheScope):
                if scope == known and tenant:
                    return PeerTenant(tenant, known), int(time)
    raise _not_trusted()


def _seal(secret: bytes, said: str, request_id: str, body: bytes | bytearray) -> str:
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    digest = hashlib.sha256(body).digest()
    for part in (_TAG, said.encode("latin-1", "replace"), request_id.encode("latin-1", "replace")):
        mac.update(len(part).to_bytes(8, "little"))
        mac.update(part)
    mac.update(digest)
    return mac.hexdigest()


def _not_trusted() -> ApiError:
    return unauthorized(
        f"The {HEADER} header is not valid here: forebays that trust each other must share the "
        "server secret, and their clocks must agree within two minutes."
    )
