"""CacheIdentity: which numbers a stored block holds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

_TAG = b"forebay/cache-identity/1"


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """Everything that must agree before one engine may read KV that another wrote.

    `weights` is the checkpoint's SHA-256, `adapter` its adapter's ("" without one), `topology` how
    the model was split ("tp1" for one piece). A model swapped under the same name has another
    `weights`, hence another identity.
    """

    weights: str
    adapter: str
    kv_dtype: str
    layout: str
    block_tokens: int
    topology: str

    def digest(self) -> bytes:
        """SHA-256 over tagged, named, length-prefixed fields: 32 bytes, canonical."""
        state = hashlib.sha256(_TAG)
        for spec in fields(self):
            for part in (spec.name.encode(), str(getattr(self, spec.name)).encode()):
                state.update(len(part).to_bytes(8, "little"))
                state.update(part)
        return state.digest()
