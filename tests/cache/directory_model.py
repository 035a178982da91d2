"""What the directory must answer, from sets and from looking at every block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cache.block import Tier
from cache.block_events import BlockEvents, TierChange
from policies.routing import Cached

Links = Sequence[bytes]


def chain_of(text: int, start: int, blocks: int) -> list[bytes]:
    """Links of 16-token blocks; the same for the same text and position."""
    return [
        bytes([(text * 31 + position * 7) % 256]) + text.to_bytes(7, "big") + position.to_bytes(8)
        for position in range(start, start + blocks)
    ]


def of_size(links: Links, block_tokens: int) -> list[bytes]:
    """The same prompt in larger blocks: every so-manieth link."""
    every = block_tokens // 16
    return list(links[every - 1 :: every])


def told(epoch: int, seq: int, *changes: TierChange, snapshot: bool = False) -> BlockEvents:
    return BlockEvents(epoch, seq, changes, snapshot)


def stored(links: Links, tier: Tier = Tier.DEVICE) -> TierChange:
    return TierChange(tier, stored=tuple(links))


def removed(links: Links, tier: Tier = Tier.DEVICE) -> TierChange:
    return TierChange(tier, removed=tuple(links))


@dataclass
class Believed:
    """One replica, as a directory should see it."""

    block_tokens: int
    redis: set[bytes]
    epoch: int | None = None
    seq: int | None = None
    device: set[bytes] = field(default_factory=set)
    dram: set[bytes] = field(default_factory=set)
    routed: set[bytes] = field(default_factory=set)

    def apply(self, events: BlockEvents) -> bool:
        if self.epoch is None or events.epoch > self.epoch:
            if self.epoch is not None:
                self.routed.clear()
            self.forget()
            self.epoch, self.seq = events.epoch, 0
        if events.epoch < self.epoch:
            return True
        if events.snapshot:
            if self.seq is not None and events.seq < self.seq:
                return True
            self.forget()
        else:
            if self.seq is None:
                return False
            if events.seq <= self.seq:
                return True
            if events.seq != self.seq + 1:
                self.forget()
                self.seq = None
                return False
        self.seq = events.seq
        for change in events.changes:
            held = {Tier.DEVICE: self.device, Tier.DRAM: self.dram, Tier.REDIS: self.redis}
            held[change.tier].difference_update(change.removed)
            held[change.tier].update(change.stored)
            if change.tier is Tier.DEVICE:
                self.routed.difference_update(change.removed, change.stored)
        return True

    def forget(self) -> None:
        self.device.clear()
        self.dram.clear()

    def route(self, links: Links) -> int:
        """Returns how many blocks of the beginning were on the device or expected there."""
        first = 0
        while first < len(links) and links[first] in self.device | self.routed:
            first += 1
        self.routed.update(links[first:])
        return first

    def tiers(self, links: Links) -> list[Tier | None]:
        """Each block's fastest tier."""
        return [
            Tier.DEVICE
            if link in self.device or link in self.routed
            else Tier.DRAM
            if link in self.dram
            else Tier.REDIS
            if link in self.redis
            else None
            for link in links
        ]

    def cached(self, links: Links) -> Cached:
        """By looking at one block after the other."""
        tiers = self.tiers(links)
        held = tiers[: tiers.index(None)] if None in tiers else tiers
        return Cached(*(held.count(tier) * self.block_tokens for tier in Tier))

    def is_closed(self, links: Links) -> bool:
        """Whether who holds a block holds those before it, in the same tier or a faster one."""
        order = [*Tier, None]
        ranks = [order.index(tier) for tier in self.tiers(links)]
        behind_own = ranks.count(0) + ranks.count(1)
        in_redis = [link in self.redis for link in links[behind_own:]]
        return ranks == sorted(ranks) and in_redis == sorted(in_redis, reverse=True)
