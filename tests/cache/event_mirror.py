"""What a listener makes of block events: the links by tier, and whether a batch is missing."""

from __future__ import annotations

from collections.abc import Iterable

from cache.block import Tier
from cache.block_events import BlockEvents


class Mirror:
    """Raises AssertionError where a batch breaks the rules."""

    def __init__(self) -> None:
        self.held: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self.epoch = 0
        self.seq = 0
        self.batches = 0

    def apply(self, events: BlockEvents) -> None:
        if self.batches:
            assert events.epoch == self.epoch, "another life"
            assert events.seq == self.seq + 1, "a batch is missing, or came twice"
        self.epoch, self.seq = events.epoch, events.seq
        self.batches += 1
        if events.snapshot:
            self.held = {tier: set() for tier in Tier}
        tiers = [change.tier for change in events.changes]
        assert len(set(tiers)) == len(tiers), "a tier comes twice in one batch"
        for change in events.changes:
            held = self.held[change.tier]
            assert change.stored or change.removed, "nothing is told of a tier"
            assert not held.intersection(change.stored), "what is there is stored again"
            held.update(change.stored)
            assert held.issuperset(change.removed), "what is not there is removed"
            held.difference_update(change.removed)
            assert not held.intersection(change.removed), "a link is stored and removed at once"

    def check(self, tier: Tier, links: Iterable[bytes]) -> None:
        assert self.held[tier] == set(links), f"what was told of {tier} is not what it holds"
