"""Prompts as links, for tests: what begins alike has the same links."""

from __future__ import annotations

import hashlib

from cache.hashing import HASH_BYTES


def prefix(text: str) -> tuple[bytes, ...]:
    """One link for each letter, which depends on all letters up to it."""
    return tuple(
        hashlib.blake2b(text[:end].encode(), digest_size=HASH_BYTES).digest()
        for end in range(1, len(text) + 1)
    )


def long_prefix(seed: int, links: int) -> tuple[bytes, ...]:
    """A prompt that shares nothing with one of another seed."""
    return tuple(seed.to_bytes(8, "big") + at.to_bytes(8, "big") for at in range(links))
