"""The directory: which replica holds which blocks of prompts, and in which tier.

It is fed by what replicas tell (`cache.block_events`), by what was sent to them, and by what they
say they served. What it answers are predictions: a wrong one costs computing, never a wrong text.

A block that is known takes about 110 bytes, whoever holds it (`python -m cache.bench_directory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from cache.block import Tier
from cache.block_events import BlockEvents
from cache.directory_fleet import Fleet, RedisGroup
from cache.directory_marks import AgingMarks
from cache.directory_stats import DirectoryStats, ReplicaBlocks
from cache.directory_table import BlockTable, Slot
from cache.hashing import CHAIN_BLOCK_TOKENS
from policies.routing import Cached

_MOST_ROUTED_BLOCKS = 1 << 16
"""Of a replica that tells events: what was sent there and is not told of yet."""
_UNTIL_TOLD_S = 8.0
_UNTIL_EVICTED_S = 900.0
_MOST_COMPUTING = 1024
_BROKEN_PROMISES = 3
_MOST_RETIRED = 64
_SWEEP_BLOCKS = 512


class _Replica:
    """One replica. `slot` is what it told in this life; `seq` the batch that was applied last, None
    as long as one is missing."""

    __slots__ = (
        "broken_in_a_row",
        "computing",
        "epoch",
        "fleet",
        "group",
        "marks",
        "name",
        "seq",
        "slot",
    )

    def __init__(self, name: str, fleet: Fleet, group: RedisGroup) -> None:
        self.name = name
        self.fleet = fleet
        self.group = group
        self.epoch: int | None = None
        self.seq: int | None = None
        self.broken_in_a_row = 0
        self.computing: dict[bytes, float] = {}
        """The first block that a prompt sent there had to have computed, and when that was over:
        infinity until then."""
        self.slot: Slot
        self.marks: AgingMarks


class Directory:
    """Belongs to one thread. Times are seconds of any one clock that does not go back.

    A replica's name that has not joined, or has left, is passed over wherever it is told of: news
    and answers may come after the end.
    """

    def __init__(self, *, max_blocks: int = 4_000_000) -> None:
        """Blocks beyond `max_blocks` are refused and counted. Of each Redis that is shared, at most
        half of that is remembered. Raises ValueError unless there is room for a block."""
        self._table = BlockTable(max_blocks)
        self._fleets: dict[int, Fleet] = {}
        self._groups: dict[tuple[str, int, bool], RedisGroup] = {}
        self._replicas: dict[str, _Replica] = {}
        self._next_expiry_s = inf
        self._gaps = 0
        self._corrections = 0
        self._contradictions = 0

    def join(
        self,
        replica: str,
        *,
        block_tokens: int = CHAIN_BLOCK_TOKENS,
        shares_redis: str | None = None,
        approximate_blocks: int | None = None,
        ttl_s: float | None = None,
    ) -> None:
        """A replica that will tell events or, where `approximate_blocks` says how many blocks it
        may hold, is tracked by what is sent to it.

        `block_tokens` is its block size. `shares_redis` names what it shares through Redis with
        others of one cache identity: what any of them wrote there, all of them can load; that
        outlives them. `ttl_s` is how long something sent to it is expected to be there: 8 seconds
        unless said otherwise where events will tell, else 15 minutes.

        Raises ValueError for a name that has joined already, for a block size that is not a
        multiple of 16, and for no blocks or no time.
        """
        if replica in self._replicas:
            raise ValueError(f"replica {replica} has joined already")
        if block_tokens < 1 or block_tokens % CHAIN_BLOCK_TOKENS:
            raise ValueError(f"blocks of {block_tokens} tokens are not a multiple of 16")
        tells_events = approximate_blocks is None
        if ttl_s is None:
            ttl_s = _UNTIL_TOLD_S if tells_events else _UNTIL_EVICTED_S
        if not ttl_s > 0 or (approximate_blocks is not None and approximate_blocks < 1):
            raise ValueError(f"{approximate_blocks} blocks for {ttl_s} s cannot be tracked")
        fleet = self._fleets.get(block_tokens)
        if fleet is None:
            fleet = self._fleets[block_tokens] = Fleet(self._table, block_tokens)
        shared = shares_redis is not None
        group = self._group(
            (shares_redis if shares_redis is not None else replica, block_tokens, shared)
        )
        joining = _Replica(replica, fleet, group)
        joining.marks = AgingMarks(
            self._table,
            capacity_blocks=(
                approximate_blocks if approximate_blocks is not None else _MOST_ROUTED_BLOCKS
            ),
            ttl_s=ttl_s,
            opened=lambda slot: fleet.open_marks(slot, joining.slot),
            closed=fleet.close_marks,
        )
        joining.slot = self._table.open_slot()
        fleet.add(replica, joining.slot, group)
        self._replicas[replica] = joining

    def leave(self, replica: str) -> None:
        """Its entries count no more. Takes no longer for many than for none."""
        leaving = self._replicas.pop(replica, None)
        if leaving is None:
            return
        leaving.marks.clear()
        leaving.fleet.remove(leaving.slot, leaving.group)
        self._table.retire(leaving.slot)
        key = (replica, leaving.fleet.block_tokens, False)
        if self._groups.get(key) is leaving.group:
            self._drop_group(key)

    def apply(self, replica: str, events: BlockEvents) -> bool:
        """Take in what a replica tells. False: something was missed, all it told is forgotten, and
        nothing short of a snapshot will do; true otherwise.

        Epochs grow: a larger one ends all that was known of the one before, a smaller one is late
        and passed over, as is a batch that was applied already, or a snapshot from before it.
        """
        teller = self._replicas.get(replica)
        if teller is None:
            return True
        if teller.epoch is None or events.epoch > teller.epoch:
            if teller.epoch is not None:
                teller.marks.clear()
                teller.computing.clear()
                teller.broken_in_a_row = 0
                self._forget_told(teller)
            teller.epoch = events.epoch
            teller.seq = 0
        elif events.epoch < teller.epoch:
            return True
        if events.snapshot:
            if teller.seq is not None and events.seq < teller.seq:
                return True
            self._forget_told(teller)
        elif teller.seq is None:
            return False
        elif events.seq <= teller.seq:
            return True
        elif events.seq > teller.seq + 1:
            self._gaps += 1
            self._forget_told(teller)
            teller.seq = None
            return False
        teller.seq = events.seq
        self._take_in(teller, events)
        self._tidy()
        return True

    def note_routed(self, replica: str, links: Sequence[bytes], now_s: float) -> int:
        """A prompt with these links, or with these behind others, was just sent there.

        Returns from which of them on that was news: what others who track this replica should hear.
        At most as many as the replica can hold are taken.
        """
        taker = self._replicas.get(replica)
        if taker is None or not links:
            return len(links)
        links = links[: taker.marks.capacity_blocks]
        computed_first = self._table.prefix_end(
            links,
            taker.slot.near | taker.slot.far | taker.marks.bits | taker.group.marks.bits,
        )
        if computed_first < len(links):
            taker.computing.pop(links[computed_first], None)
            taker.computing[links[computed_first]] = inf
            if len(taker.computing) > _MOST_COMPUTING:
                del taker.computing[next(iter(taker.computing))]
        news = self._mark(taker, links, now_s)
        self._tidy()
        return news

    def correct(
        self,
        replica: str,
        links: Sequence[bytes],
        served_tokens: int,
        *,
        promised: Cached,
        decided_s: float,
        now_s: float,
    ) -> None:
        """A prompt with these links had its first token, and so many of its tokens came from the
        replica's cache. `promised` is what `lookup` said when it was sent there, at `decided_s`;
        one block less at the prompt's end is as promised, the last token being computed always.

        Served more: it is held. Served less: what was expected behind it is forgotten, unless
        another prompt was still computing it when this one was sent there; and what was to come
        from Redis, where it stopped there, for all who share it. What the replica told of its
        device goes only after three such promises in a row that were not kept: it has computed the
        prompt meanwhile, so that what it told is true again unless it never was.
        """
        server = self._replicas.get(replica)
        if server is None or not links:
            return
        size = server.fleet.block_tokens
        served = min(served_tokens // size, len(links))
        expected = min(promised.tokens // size, len(links))
        computed_s = -inf
        if served < len(links):
            computed_s = server.computing.get(links[served], -inf)
            if computed_s == inf:
                server.computing[links[served]] = now_s
        if served >= expected or (expected == len(links) == served + 1):
            if promised.device:
                server.broken_in_a_row = 0
            if served > expected:
                self._mark(server, links[:served][: server.marks.capacity_blocks], now_s)
        elif computed_s < decided_s:
            self._shrink(server, links, served, promised)
        self._tidy()

    def lookup(self, links: Mapping[int, Sequence[bytes]], now_s: float) -> dict[str, Cached]:
        """What each replica is believed to hold of a prompt's beginning, those that hold nothing
        left out. `links` are those of its full blocks, in order, by block size; a replica whose
        size is not among them is left out too.

        A block counts for its fastest tier; what was sent to a replica counts as on its device.
        `Fleet.find` says how long it takes, and when it is not exact.
        """
        if now_s >= self._next_expiry_s:
            self._expire(now_s)
        found: dict[str, Cached] = {}
        for size, fleet in self._fleets.items():
            chain = links.get(size)
            if chain:
                found.update(fleet.find(chain))
        return found

    def needs_snapshot(self, replica: str) -> bool:
        """Whether something that it told was missed."""
        asked = self._replicas.get(replica)
        return asked is not None and asked.epoch is not None and asked.seq is None

    def sweep(self, budget_blocks: int = 4096) -> bool:
        """Give back memory of what was forgotten, looking at about so many blocks (half a
        microsecond each). For idle moments; whether there is more to do."""
        return self._table.sweep(budget_blocks) > 0

    @property
    def blocks(self) -> int:
        """How many blocks are known; see `DirectoryStats`."""
        return self._table.blocks

    def stats(self) -> DirectoryStats:
        """What is known, and what went wrong so far."""
        table = self._table
        return DirectoryStats(
            blocks=table.blocks,
            bytes_estimate=table.bytes_estimate(),
            replicas={
                name: ReplicaBlocks(
                    device=replica.slot.blocks_near,
                    dram=replica.slot.blocks_far,
                    routed=replica.marks.blocks,
                )
                for name, replica in self._replicas.items()
            },
            redis={
                name: group.marks.blocks
                for (name, _, _), group in self._groups.items()
                if group.marks.blocks
            },
            unswept_slots=table.retired,
            refused=table.refused,
            gaps=self._gaps,
            corrections=self._corrections,
            contradictions=self._contradictions,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every count is right. Looks at everything."""
        self._table.check_integrity()

    def _take_in(self, teller: _Replica, events: BlockEvents) -> None:
        rewrite, slot, marks = self._table.rewrite, teller.slot, teller.marks
        for change in events.changes:
            match change.tier:
                case Tier.DEVICE:
                    # whatever was expected of these blocks has come true, or will not
                    rewrite(change.removed, clear=slot.near | marks.bits)
                    rewrite(change.stored, slot.near, marks.bits)
                case Tier.DRAM:
                    rewrite(change.removed, clear=slot.far)
                    rewrite(change.stored, slot.far)
                case Tier.REDIS:
                    in_redis = teller.group.marks
                    rewrite(change.removed, clear=in_redis.bits)
                    stored = change.stored[: in_redis.capacity_blocks]
                    if stored:
                        in_redis.make_room(len(stored), 0.0)
                        in_redis.mark(stored)

    def _mark(self, taker: _Replica, links: Sequence[bytes], now_s: float) -> int:
        """Expect these on the replica's device; from which of them on they were not yet."""
        marks, told = taker.marks, taker.slot.near
        first = self._table.prefix_end(links, told | marks.newest_bits(now_s))
        if first < len(links):
            marks.make_room(len(links), now_s)
            # another generation may have begun, and the beginning must not be older than the end
            first = self._table.prefix_end(links, told | marks.newest_bits(now_s))
            marks.mark(links[first:])
            self._next_expiry_s = min(self._next_expiry_s, marks.due_s)
        return first

    def _shrink(
        self, server: _Replica, links: Sequence[bytes], served: int, promised: Cached
    ) -> None:
        self._corrections += 1
        server.computing.pop(links[served], None)
        size = server.fleet.block_tokens
        self._table.rewrite(links[served:], clear=server.marks.bits)
        if served >= (promised.device + promised.dram) // size:
            expected = promised.tokens // size
            self._table.rewrite(links[served:expected], clear=server.group.marks.bits)
        told = server.slot.near
        if served < promised.device // size and self._table.holders(links[served]) & told:
            self._contradictions += 1
            server.broken_in_a_row += 1
            if server.broken_in_a_row >= _BROKEN_PROMISES:
                self._table.rewrite(links[served:], clear=told)

    def _forget_told(self, teller: _Replica) -> None:
        if teller.slot.blocks_near or teller.slot.blocks_far:
            old, teller.slot = teller.slot, self._table.open_slot()
            teller.fleet.move(old, teller.slot, teller.group)
            self._table.retire(old)

    def _expire(self, now_s: float) -> None:
        for replica in self._replicas.values():
            replica.marks.expire(now_s)
        self._next_expiry_s = min(
            (replica.marks.due_s for replica in self._replicas.values()), default=inf
        )

    def _tidy(self) -> None:
        """A little of the sweeping, so that sets of holders stay short, and room is found, also
        when nobody sweeps. When there is no room, what nobody can load from Redis is forgotten."""
        table = self._table
        crowded = table.blocks >= table.max_blocks - table.max_blocks // 8
        if table.retired > (0 if crowded else _MOST_RETIRED):
            table.sweep(_SWEEP_BLOCKS)
        if table.blocks >= table.max_blocks:
            for key, group in list(self._groups.items()):
                if not group.members:
                    self._drop_group(key)

    def _group(self, key: tuple[str, int, bool]) -> RedisGroup:
        """Replicas that share a Redis under this name, block size and whether it is a shared one:
        a replica that shares none has one of its own."""
        group = self._groups.get(key)
        if group is None:
            fleet = self._fleets[key[1]]
            group = self._groups[key] = RedisGroup(
                AgingMarks(
                    self._table,
                    capacity_blocks=max(1, self._table.max_blocks // 2),
                    ttl_s=inf,
                    opened=fleet.redis_changed,
                    closed=fleet.redis_changed,
                )
            )
            fleet.groups.append(group)
        return group

    def _drop_group(self, key: tuple[str, int, bool]) -> None:
        """Nobody can load what is in it any more."""
        group = self._groups.pop(key)
        group.marks.clear()
        self._fleets[key[1]].groups.remove(group)
