"""News as Redis holds it: sealed, so that only gateways with the server's secret can tell or read
it. A link beside the one before it would otherwise let a reader of Redis test guesses of the text.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from enum import Enum

from cache.sealing import NONCE_BYTES, SEAL_BYTES, Sealer

GATEWAY_BYTES = 8

_KEY_TAG = b"forebay/news/1"
_VERSION = b"\x01"
_HEAD_BYTES = len(_VERSION) + GATEWAY_BYTES
_LEAST_BYTES = _HEAD_BYTES + NONCE_BYTES + SEAL_BYTES


class NewsKind(Enum):
    """Which stream a message is for; bound in, so that it is not taken for the other."""

    ROUTED = b"routed"
    LOADS = b"loads"


class NewsSealer:
    """Version, the sender's id, nonce, AES-256-GCM under a key of its own derived from the secret.

    `gateway` is this process's id, drawn at random. What is sealed says nothing of when: who can
    write to Redis can repeat an old message, and thereby only have load guessed wrong.
    """

    def __init__(self, secret: bytes) -> None:
        self.gateway = secrets.token_bytes(GATEWAY_BYTES)
        self._sealer = Sealer(hmac.digest(secret, _KEY_TAG, hashlib.sha256))

    def seal(self, kind: NewsKind, plain: bytes) -> bytes:
        """A message from this gateway."""
        head, nonce = _VERSION + self.gateway, self._sealer.nonce()
        return head + nonce + self._sealer.seal(nonce, plain, kind.value + head)

    def is_own(self, message: bytes) -> bool:
        """Whether this gateway said it; to be asked first, since it costs no opening."""
        return message.startswith(_VERSION + self.gateway)

    def open(self, kind: NewsKind, message: bytes) -> tuple[bytes, bytes] | None:
        """The sender's id and what it said; None if no gateway with this secret has said this."""
        if not message.startswith(_VERSION) or len(message) < _LEAST_BYTES:
            return None
        head, rest = message[:_HEAD_BYTES], message[_HEAD_BYTES:]
        nonce, sealed = rest[:NONCE_BYTES], rest[NONCE_BYTES:]
        plain = self._sealer.open(nonce, sealed, kind.value + head)
        return None if plain is None else (head[len(_VERSION) :], plain)
