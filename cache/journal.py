"""What the tiers have come to hold and lost since their owner last told of it.

Kept as the difference to what was told, so that a block which comes and goes again in between is
not told of at all, and what nobody takes does not grow with the traffic but with that difference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice

from cache.block import Tier
from cache.block_events import BlockEvents, TierChange

LINKS_AT_ONCE = 4096
"""A batch of changes has at most so many links; the rest follows in the next ones."""


class TierChanges:
    """One tier's. A link is stored and removed in turn, never twice the same."""

    __slots__ = ("_removed", "_stored", "pending", "tier")

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._stored: dict[bytes, None] = {}  # in order: a block before those that extend it
        self._removed: dict[bytes, None] = {}
        self.pending = (self._stored, self._removed)
        """What is to be told."""

    def stored(self, link: bytes) -> None:
        """The tier holds this block from now on."""
        if link in self._removed:
            del self._removed[link]
        else:
            self._stored[link] = None

    def removed(self, link: bytes) -> None:
        """The tier does not hold this block any more."""
        if link in self._stored:
            del self._stored[link]
        else:
            self._removed[link] = None

    def take(self, room: int) -> TierChange:
        """At most `room` links, those that came first, which then count as told."""
        stored = _take(self._stored, room)
        return TierChange(self.tier, stored, _take(self._removed, room - len(stored)))

    def void(self) -> None:
        """Forget what was not told yet."""
        self._stored.clear()
        self._removed.clear()


class Journal:
    """Numbers the batches of one `epoch`. Owned by the step loop."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._seq = 0
        self._tiers = tuple(TierChanges(tier) for tier in Tier)
        self._pending = [links for changes in self._tiers for links in changes.pending]

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return any(self._pending)

    def of(self, tier: Tier) -> TierChanges:
        """Where this tier's changes are written down."""
        return next(changes for changes in self._tiers if changes.tier is tier)

    def take(self) -> BlockEvents | None:
        """The next batch, at most `LINKS_AT_ONCE` links; None if nothing has changed."""
        if not self:
            return None
        room = LINKS_AT_ONCE
        told: list[TierChange] = []
        for changes in self._tiers:
            if room and any(changes.pending):
                change = changes.take(room)
                room -= len(change.stored) + len(change.removed)
                told.append(change)
        return self._batch(told)

    def snapshot(self, held: Mapping[Tier, Collection[bytes]]) -> BlockEvents:
        """A batch that says all that is held; the next one goes on from there."""
        for changes in self._tiers:
            changes.void()
        return self._batch(
            [TierChange(tier, tuple(links)) for tier, links in held.items() if links],
            snapshot=True,
        )

    def _batch(self, changes: list[TierChange], *, snapshot: bool = False) -> BlockEvents:
        self._seq += 1
        return BlockEvents(self._epoch, self._seq, tuple(changes), snapshot)


def _take(links: dict[bytes, None], room: int) -> tuple[bytes, ...]:
    if len(links) <= room:
        taken = tuple(links)
        links.clear()
        return taken
    taken = tuple(islice(links, room))
    for link in taken:
        del links[link]
    return taken
