"""A block of KV as every tier knows it: its name, whose it is, how long to keep it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

TAG_BYTES = 8


class Tier(StrEnum):
    """Where KV lies, from the fastest to the one that lasts longest."""

    DEVICE = "device"
    DRAM = "dram"
    REDIS = "redis"


class Owner(NamedTuple):
    """Whose a block is, as opaque tags of 8 bytes (`cache.hashing.owner_tags`).

    Quotas, floors and erasure go by `tenant`; `scope` tells a tenant's users apart where its scope
    is per user, and is zero otherwise.
    """

    tenant: bytes
    scope: bytes


NOBODY = Owner(bytes(TAG_BYTES), bytes(TAG_BYTES))
"""Owner of prefixes that the operator shares with every tenant."""


@dataclass(frozen=True, slots=True)
class BlockKey:
    """A full block's name and what a hit must agree with beside the name.

    `link` is the chain hash of the block, `parent` the one before it, `token_bytes` the block's own
    ids as little-endian uint32: a hash collision then shows as a difference and is a miss.
    `start` is the position of its first token.
    """

    link: bytes
    parent: bytes
    token_bytes: bytes
    start: int = 0
    owner: Owner = NOBODY


@dataclass(frozen=True, slots=True)
class Retention:
    """A wish to keep the first `tokens` of a prompt for `seconds` after its last use.

    Kept blocks go after all others, within their tenant's quota. `durable` ones are written to
    Redis at once, where they live at least that long.
    """

    tokens: int
    seconds: float
    durable: bool = False
