"""One forebay speaking for a tenant of its own to another.

The header `x-forebay-peer` says whose request it is and how it stands with others, sealed under
the secret that both servers share: `2.TENANT.SCOPE.CLASS.WEIGHT.DUE.TPOT.TIME.NONCE.SEAL`, the
tenant in URL-safe base64, the weight in thousandths, in milliseconds until when the first token is
due and how far apart tokens may be (`-`: nothing was promised), the time in Unix seconds, the nonce
and the seal in hex. Version 1, `1.TENANT.SCOPE.TIME.NONCE.SEAL`, is still understood. The seal is
an HMAC-SHA256 over all of it, the request's id and the SHA-256 of its body, so that neither can be
put to another's use.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import cast, get_args

from gateway.errors import ApiError, unauthorized
from gateway.http_call import HttpCall
from gateway.tenants import CacheScope
from policies.service_class import ServiceClass

HEADER = "x-forebay-peer"
CLOCKS_APART_S = 120
_TAG = b"forebay/peer/1"
_LONGEST = 2048
_TIME = re.compile(r"[0-9]{1,12}")
_NONCE = re.compile(r"[0-9a-f]{16}")
_WHOLE = re.compile(r"[0-9]{1,9}")
_NOTHING = "-"
_MOST = 999_999_999


@dataclass(frozen=True, slots=True)
class PeerTenant:
    """Whose request it is at the peer that sent it, and within what its prompts share KV.

    It is to run in `service_class`, where the tenant has this weight; its first token is due in
    `due_s` from when it was sent, and its tokens at most `tpot_s` apart. A class of None: the peer
    has said nothing of all that.
    """

    id: str
    cache_scope: CacheScope
    service_class: ServiceClass | None = None
    weight: float = 1.0
    due_s: float | None = None
    tpot_s: float | None = None


def sign(
    secret: bytes, tenant: PeerTenant, *, request_id: str, body: bytes | bytearray, now_s: float
) -> str:
    """The header's value, good for one request and about two minutes."""
    name = base64.urlsafe_b64encode(tenant.id.encode("utf-8", "surrogatepass")).decode()
    if tenant.service_class is None:
        version, order = "1", []
    else:
        weight = str(max(1, _thousandths(tenant.weight)))
        version = "2"
        order = [tenant.service_class, weight, _said(tenant.due_s), _said(tenant.tpot_s)]
    end = (str(int(now_s)), secrets.token_hex(8))
    said = ".".join((version, name, tenant.cache_scope, *order, *end))
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
        case ["1", name, scope, time, nonce]:
            tenant = PeerTenant(_read_name(name), _read_scope(scope))
        case ["2", name, scope, its_class, weight, due, tpot, time, nonce]:
            tenant = PeerTenant(
                _read_name(name),
                _read_scope(scope),
                _read_class(its_class),
                weight=max(1, _read_whole(weight)) / 1e3,
                due_s=None if due == _NOTHING else _read_whole(due) / 1e3,
                tpot_s=None if tpot == _NOTHING else _read_whole(tpot) / 1e3,
            )
        case _:
            raise _not_trusted()
    if not (_TIME.fullmatch(time) and _NONCE.fullmatch(nonce)):
        raise _not_trusted()
    return tenant, int(time)


def _read_name(value: str) -> str:
    try:
        name = base64.urlsafe_b64decode(value).decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        raise _not_trusted() from None
    if not name:
        raise _not_trusted()
    return name


def _read_scope(value: str) -> CacheScope:
    for known in get_args(CacheScope):
        if value == known:
            return cast(CacheScope, known)
    raise _not_trusted()


def _read_class(value: str) -> ServiceClass:
    try:
        return ServiceClass(value)
    except ValueError:
        raise _not_trusted() from None


def _read_whole(value: str) -> int:
    if not _WHOLE.fullmatch(value):
        raise _not_trusted()
    return int(value)


def _thousandths(value: float) -> int:
    return min(_MOST, max(0, round(value * 1e3)))


def _said(seconds: float | None) -> str:
    return _NOTHING if seconds is None else str(_thousandths(seconds))


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
