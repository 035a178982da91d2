"""Who of the replicas with one block size holds how much of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from cache.directory_marks import AgingMarks
from cache.directory_table import BlockTable, Slot
from policies.routing import Cached

_LOOKED_AT_ONE_BY_ONE = 64
"""Prompts of at most so many blocks are answered exactly."""
_MOST_PROBES = 512
_MOST_REMEMBERED = 4096


class RedisGroup:
    """Replicas that load from Redis what any of them wrote there. `members` are their near bits;
    `marks` what is believed to be there."""

    __slots__ = ("marks", "members")

    def __init__(self, marks: AgingMarks) -> None:
        self.members = 0
        self.marks = marks


# plain tuples, because there may be hundreds in one look-up
_Run: TypeAlias = tuple[int, int]
"""From which block on, until the next run begins, which bits are set."""
_Holding: TypeAlias = tuple[int, int, int, int]
"""Replicas, by their near bits, and how many blocks each of them holds on the device, in DRAM and
in Redis."""


class Fleet:
    """Replicas with blocks of one size. A replica is known by the near bit of the slot that holds
    what it tells of itself; what was routed to it is marked in slots of their own."""

    def __init__(self, table: BlockTable, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.groups: list[RedisGroup] = []
        self._table = table
        self._names: dict[int, str] = {}  # by near bit
        self._owners: dict[int, int] = {}  # near bit of a slot of marks: its replica's near bit
        self._marked = 0  # all of these bits
        self._replicas = 0
        self._counts = 0  # bits of everything that is not in Redis
        # worked out before; bits that have not counted since some of them ceased to are in none
        self._tiers_of: dict[int, tuple[int, int, int]] = {}
        self._names_of: dict[int, tuple[str, ...]] = {}

    def add(self, name: str, slot: Slot, group: RedisGroup) -> None:
        """A replica that will hold in this slot, and load from the group's Redis."""
        self._names[slot.near] = name
        self._replicas |= slot.near
        self._counts |= slot.near | slot.far
        group.members |= slot.near
        self._tiers_of.clear()  # of what is in Redis

    def remove(self, slot: Slot, group: RedisGroup) -> None:
        """The replica of this slot holds nothing in it any more. Its marks have been closed."""
        del self._names[slot.near]
        self._replicas &= ~slot.near
        self._counts &= ~(slot.near | slot.far)
        group.members &= ~slot.near
        self._tiers_of.clear()
        self._names_of.clear()

    def move(self, old: Slot, new: Slot, group: RedisGroup) -> None:
        """The replica of one slot holds in another one from now on; its marks go with it."""
        name = self._names[old.near]
        marked = [mark for mark, owner in self._owners.items() if owner == old.near]
        self.remove(old, group)
        self.add(name, new, group)
        for mark in marked:
            self._owners[mark] = new.near

    def open_marks(self, slot: Slot, replica: Slot) -> None:
        """What is marked in `slot` counts as on the replica's device."""
        self._owners[slot.near] = replica.near
        self._marked |= slot.near
        self._counts |= slot.near

    def close_marks(self, slot: Slot) -> None:
        """It counts no more."""
        del self._owners[slot.near]
        self._marked &= ~slot.near
        self._counts &= ~slot.near
        self._tiers_of.clear()

    def redis_changed(self, _: Slot) -> None:
        """A slot of some group's marks begins or ceases to count."""
        self._tiers_of.clear()

    def find(self, links: Sequence[bytes]) -> dict[str, Cached]:
        """What each replica holds of a prompt's beginning; nobody who holds nothing.

        Exact up to 64 blocks. In a longer prompt the ends of holdings are found by halving, for
        all replicas at once: two probes where all hold all of it, about eleven for each different
        end in 32k tokens. That takes for granted that a replica which holds one block holds those
        before it in the same tier or a faster one, as it does when leaves are evicted first. A hole
        is not seen then, and promises too much until `correct` shrinks it. After 512 probes the
        rest counts as held by those alone who hold both ends of it in the same tier.
        """
        if not links:
            return {}
        if len(links) <= _LOOKED_AT_ONE_BY_ONE:
            counts = self._counts
            for group in self.groups:
                counts |= group.marks.bits
            holdings = self._follow(self._look_at_all(links, counts), len(links))
        else:
            holdings = self._follow(self._look_for_ends(links, self._counts), len(links))
            for group in self.groups:
                if group.members and group.marks.bits:
                    holdings = self._extend(holdings, links, group)
        size = self.block_tokens
        found: dict[str, Cached] = {}
        for replicas, device, dram, redis in holdings:
            if device or dram or redis:
                cached = Cached(device * size, dram * size, redis * size)
                for name in self._names_in(replicas):
                    found[name] = cached
        return found

    def _look_at_all(self, links: Sequence[bytes], counts: int) -> list[_Run]:
        shards = self._table.shards
        runs: list[_Run] = []
        before = -1
        for start, link in enumerate(links):
            bits = shards[link[0]].get(link, 0) & counts
            if bits != before:
                runs.append((start, bits))
                if not bits:
                    break
                before = bits
        return runs

    def _look_for_ends(self, links: Sequence[bytes], counts: int) -> list[_Run]:
        """The runs up to where nobody holds anything, by halving between probes that differ; what
        lies between two probes that do not is taken to be like them."""
        shards, every_near = self._table.shards, self._table.every_near

        def counting(holders: int) -> int:
            bits = holders & counts
            # a copy in DRAM of what is on the device makes no difference, hence no run of its own
            return bits & ~((bits & every_near) << 1)

        low, low_holders = 0, self._table.holders(links[0])
        low_bits = counting(low_holders)
        runs: list[_Run] = [(low, low_bits)]
        if not low_bits:
            return runs
        high = len(links) - 1
        high_holders = self._table.holders(links[high])
        high_bits = counting(high_holders)
        further: list[tuple[int, int, int]] = []  # probes to the right of `high`, the nearest last
        probes = 2
        while True:
            if high_bits != low_bits:
                if high - low > 1 and probes < _MOST_PROBES:
                    probes += 1
                    middle = (low + high) >> 1
                    link = links[middle]
                    holders = shards[link[0]].get(link, 0)
                    # equal sets of holders are one object, nearly always
                    if holders is low_holders:
                        low = middle
                    elif holders is high_holders:
                        high = middle
                    else:
                        further.append((high, high_holders, high_bits))
                        high, high_holders, high_bits = middle, holders, counting(holders)
                    continue
                if high - low > 1:
                    runs.append((low + 1, low_bits & high_bits))
                runs.append((high, high_bits))
                if not high_bits:
                    return runs
            if not further:
                return runs
            low, low_holders, low_bits = high, high_holders, high_bits
            high, high_holders, high_bits = further.pop()

    def _follow(self, runs: Sequence[_Run], blocks: int) -> list[_Holding]:
        """How far each replica gets, runs in order, always from the fastest tier. All replicas are
        in the answer, also those that get nowhere."""
        going: list[_Holding] = [(self._replicas, 0, 0, 0)]
        ended: list[_Holding] = []
        next_starts = [start for start, _ in runs[1:]]
        next_starts.append(blocks)
        for (start, bits), end in zip(runs, next_starts, strict=True):
            on_device, in_dram, in_redis = self._tiers(bits)
            anywhere = on_device | in_dram | in_redis
            length = end - start
            still: list[_Holding] = []
            for holding in going:
                replicas, device, dram, redis = holding
                if here := replicas & on_device:
                    still.append((here, device + length, dram, redis))
                if here := replicas & in_dram:
                    still.append((here, device, dram + length, redis))
                if here := replicas & in_redis:
                    still.append((here, device, dram, redis + length))
                if here := replicas & ~anywhere:
                    ended.append((here, device, dram, redis))
            going = still
            if not going:
                break
        return ended + going

    def _extend(
        self, holdings: Iterable[_Holding], links: Sequence[bytes], group: RedisGroup
    ) -> list[_Holding]:
        """Behind what its members hold themselves, they hold what Redis has."""
        extended: list[_Holding] = []
        run_start = run_end = -1
        for replicas, device, dram, redis in sorted(holdings, key=_blocks):
            members = replicas & group.members
            if members:
                start = device + dram
                if not run_start <= start < run_end:
                    run_start = start
                    run_end = self._table.prefix_end(links, group.marks.bits, start)
                extended.append((members, device, dram, run_end - start))
            if others := replicas & ~members:
                extended.append((others, device, dram, redis))
        return extended

    def _tiers(self, bits: int) -> tuple[int, int, int]:
        """The replicas that have a block with these bits on the device; those of the others that
        have it in DRAM; those of the others that find it in Redis."""
        found = self._tiers_of.get(bits)
        if found is None:
            on_device = bits & self._replicas
            marked = bits & self._marked
            while marked:
                mark = marked & -marked
                on_device |= self._owners[mark]
                marked ^= mark
            in_dram = (bits >> 1) & self._replicas & ~on_device
            in_redis = 0
            for group in self.groups:
                if bits & group.marks.bits:
                    in_redis |= group.members
            found = on_device, in_dram, in_redis & ~(on_device | in_dram)
            if len(self._tiers_of) >= _MOST_REMEMBERED:
                self._tiers_of.clear()
            self._tiers_of[bits] = found
        return found

    def _names_in(self, replicas: int) -> tuple[str, ...]:
        found = self._names_of.get(replicas)
        if found is None:
            found = tuple(name for near, name in self._names.items() if replicas & near)
            if len(self._names_of) >= _MOST_REMEMBERED:
                self._names_of.clear()
            self._names_of[replicas] = found
        return found


def _blocks(holding: _Holding) -> int:
    _, device, dram, redis = holding
    return device + dram + redis
