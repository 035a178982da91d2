"""The seam between the gateway and whatever generates tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from cache.block_events import BlockEvents
from cache.block_pool import Share
from cache.report import CacheStats, Erased
from engine.report import EngineStats
from engine.request import EngineOutput, EngineRequest
from gateway.dispatch.member import Health
from policies.cost import Coefficients

TokenStream = AsyncIterator[EngineOutput]
"""One request's outputs, the last with a finish reason."""


class ReplicaUnavailable(Exception):
    """The replica cannot take this request, or has lost it; nothing of it runs there any more.

    `full`: it has no place for one more, and sending the request elsewhere would only spread the
    overload. `blames_replica`: it broke down, rather than being stopped on purpose.
    """

    def __init__(self, message: str, *, full: bool = False, blames_replica: bool = True) -> None:
        super().__init__(message)
        self.full = full
        self.blames_replica = blames_replica and not full


class Replica(Protocol):
    """One engine that serves one model, wherever it runs."""

    @property
    def name(self) -> str:
        """Unique among all replicas."""
        ...

    def health(self) -> Health:
        """Whether it serves, and if not why; cheap."""
        ...

    def coefficients(self) -> Coefficients:
        """What work takes there, as last told; cheap."""
        ...

    def submit(self, request: EngineRequest) -> AbstractAsyncContextManager[TokenStream]:
        """Start the request on entering, abort it on leaving if it has not finished.

        Raises ReplicaUnavailable on entering when draining, full or dead, and from the stream when
        the engine dies under it. Leaving the scope frees slot and pages within one step.
        """
        ...

    def stats(self) -> EngineStats:
        """The latest snapshot; cheap, safe from the event loop."""
        ...

    def cache_stats(self) -> CacheStats:
        """The tiers' counters and each tenant's share; cheap, safe from the event loop."""
        ...

    async def erase_cache(self, tenant: bytes, scope: bytes | None) -> Erased:
        """Remove a tenant's blocks (by its tags; `scope` None: all of its users') from every tier.

        Blocks that running requests hold go when those end; they are found by nobody from now on.
        """
        ...

    async def flush_cache(self) -> Erased:
        """Remove every block that is this model's from every tier."""
        ...

    async def set_shares(
        self, device: Mapping[bytes, Share], dram: Mapping[bytes, Share], redis: Mapping[bytes, int]
    ) -> None:
        """Put tenants' floors and quotas to use, in blocks, in Redis in bytes."""
        ...

    async def block_snapshot(self) -> BlockEvents:
        """Everything that its tiers hold now, for who has lost count."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests and wait until the running ones are done, or the time is up."""
        ...

    async def close(self) -> None:
        """Stop for good and give everything back. Idempotent."""
        ...
