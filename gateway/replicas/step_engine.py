"""What a replica needs of an engine, in whichever process it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from cache.block_events import BlockEvents
from cache.block_pool import Share
from cache.report import CacheStats, Erased
from engine.report import EngineStats, StepReport
from engine.request import EngineRequest

Sink = Callable[[StepReport], None]
"""Called on the engine's thread with everything that a step has to say."""


class StepEngine(Protocol):
    """As much of `engine.engine.Engine` as replicas use."""

    def start(self) -> None:
        """Start stepping."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Put a request in line; its outcome comes through the sink."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are fine."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot, from any thread."""
        ...

    def cache_stats(self) -> CacheStats:
        """The tiers' counters, from any thread."""
        ...

    def erase_cache(self, tenant: bytes | None, scope: bytes | None) -> Erased:
        """Remove an owner's blocks, or everybody's, from every tier; blocks."""
        ...

    def set_shares(
        self, device: Mapping[bytes, Share], dram: Mapping[bytes, Share], redis: Mapping[bytes, int]
    ) -> None:
        """Put floors and quotas to use; blocks."""
        ...

    def block_snapshot(self) -> BlockEvents:
        """Everything that the tiers hold; blocks."""
        ...

    def close(self) -> None:
        """Abort what runs and stop; blocks."""
        ...
