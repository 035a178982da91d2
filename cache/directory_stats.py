"""What the directory knows of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaBlocks:
    """How many blocks a replica is known to hold, by tier; `routed` ones are expected on its device
    because of what was sent there."""

    device: int
    dram: int
    routed: int


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    """`blocks` are known, by replica and in all; some of them may be held only by those who have
    left, until they are swept. Redis counts by the name that replicas share it under, or by the
    replica's name where it is alone.

    Counted since the start: blocks `refused` because there was no room; `gaps` in what was told;
    `corrections`, promises that were not kept and made an entry shrink; `contradictions`, those
    among them that the replica's own word of its device had backed.
    """

    blocks: int
    bytes_estimate: int
    replicas: Mapping[str, ReplicaBlocks]
    redis: Mapping[str, int]
    unswept_slots: int
    refused: int
    gaps: int
    corrections: int
    contradictions: int
