"""Who may use what is the operator's alone."""

from __future__ import annotations

import hashlib
import hmac

from gateway.errors import ApiError, unauthorized
from gateway.http_call import HttpCall
from gateway.reload import Snapshot


def require_operator(call: HttpCall, snapshot: Snapshot) -> None:
    """Raises unless the call carries the operator's key as a bearer token: a 401 ApiError, or a 403
    if this gateway has no such key.

    The comparison is of digests and takes the same time whatever was sent.
    """
    expected = snapshot.admin_key_digest
    if expected is None:
        variable = snapshot.settings.server.admin_key_env
        raise ApiError(
            403,
            f"This gateway has no operator's key: set {variable} in its environment and restart.",
            type="permission_error",
            code="no_admin_key",
        )
    scheme, _, key = (call.header("authorization") or "").partition(" ")
    key = key.strip(" \t")
    presented = hashlib.sha256(key.encode("latin-1")).digest()  # the bytes that came, UTF-8 or not
    if scheme.lower() != "bearer" or not key:
        raise unauthorized("This needs the operator's key as 'Authorization: Bearer KEY'.")
    if not hmac.compare_digest(presented, expected):
        raise unauthorized("This is not the operator's key.")


def operator_id(secret: bytes, snapshot: Snapshot) -> str:
    """What names the operator's key in the audit trail, the same at every gateway of one `secret`.
    Under that it is keyed: a key that somebody thought up could be found by trying."""
    digest = snapshot.admin_key_digest or b""
    return "op-" + hmac.digest(secret, b"operator\0" + digest, "sha256").hex()[:12]
