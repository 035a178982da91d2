"""Sealing: stored blocks that only holders of the server's secret can read."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES = 12
SEAL_BYTES = 16
"""What a sealed text is longer than the plain one: the authentication tag."""

_KEY_TAG = b"forebay/kv-seal/1"


class Sealer:
    """AES-256-GCM under a key derived from the server's secret.

    Nonces are random: 96 bits keep the odds of a repeat under 2**-32 up to 2**32 blocks, more than
    a petabyte of KV. Thread-safe.
    """

    def __init__(self, secret: bytes) -> None:
        self._cipher = AESGCM(hmac.digest(secret, _KEY_TAG, hashlib.sha256))

    def nonce(self) -> bytes:
        """A fresh nonce for one `seal`; it is stored beside the sealed text."""
        return secrets.token_bytes(NONCE_BYTES)

    def seal(self, nonce: bytes, plain: bytes | memoryview, bound: bytes) -> bytes:
        """`plain`, sealed, with its tag at the end. `bound` is not stored: opening needs the same,
        so that a sealed text cannot be moved to another place."""
        return self._cipher.encrypt(nonce, plain, bound)

    def open(self, nonce: bytes, sealed: bytes | memoryview, bound: bytes) -> bytes | None:
        """The plain text, or None if this secret did not seal these bytes with this `bound`."""
        try:
            return self._cipher.decrypt(nonce, sealed, bound)
        except InvalidTag:
            return None
