"""How far two token sequences agree."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

TOKEN_BYTES = 4


def as_bytes(token_ids: Sequence[int]) -> bytes:
    """Ids as uint32 in this machine's byte order: to be compared here, never stored or sent."""
    return array("I", token_ids).tobytes()


def common_tokens(one: bytes, other: bytes) -> int:
    """How many tokens both begin with; both as `as_bytes` gives them."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size // TOKEN_BYTES
    a = np.frombuffer(one, dtype=np.uint32, count=size // TOKEN_BYTES)
    b = np.frombuffer(other, dtype=np.uint32, count=size // TOKEN_BYTES)
    return int(np.argmax(a != b))
