"""Which replica is believed to hold which blocks, in which tier: sets of replicas as integers.

As `cache.directory`, but for block ids of traces, with prompts looked up for a thousand replicas at
once, and with news that may be late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from loadtest.simulate.clock import Clock
from loadtest.simulate.pool import BlockPool
from loadtest.simulate.redis_tier import RedisTier
from policies.routing import NOTHING_CACHED, Cached

_UNTIL_TOLD_S = 8.0
"""What was sent to a replica counts as on its device for so long, or until it is told of."""


TellOf = Callable[[int], None]
"""Tells of a block by its id."""


class Place(IntEnum):
    """A tier of one replica."""

    DEVICE = 0
    DRAM = 1


class Warm(NamedTuple):
    """Replicas, one bit each, that have the same of a prompt."""

    replicas: int
    cached: Cached


class Sent:
    """A prompt that was sent to a replica, and what of it the replica was not known to have."""

    __slots__ = ("bit", "blocks", "until_s")

    def __init__(self, bit: int, blocks: Sequence[int], until_s: float) -> None:
        self.bit = bit
        self.blocks = blocks
        self.until_s = until_s


class BlockDirectory:
    """Of `replicas` replicas, each of which has a bit by its number. What they tell is known
    `delay_s` later; what `redis` holds is known at once, and to all."""

    def __init__(
        self,
        clock: Clock,
        replicas: int,
        block_tokens: int,
        *,
        redis: RedisTier | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._everybody = (1 << replicas) - 1
        self._block_tokens = block_tokens
        self._redis = redis
        self._delay_s = delay_s
        self._told: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._news: deque[tuple[float, Place, int, int, bool]] = deque()
        self._sent: deque[Sent] = deque()
        self._expected: dict[int, int] = {}
        self._common: BlockPool | None = None

    def everybody_has(self, pool: BlockPool) -> None:
        """What is in this pool is on everybody's device."""
        self._common = pool

    def tellers(self, place: Place, bit: int) -> tuple[TellOf, TellOf]:
        """By which one tier of a replica tells of a block: that it has stored it, and that it has
        lost it."""
        told, keep = self._told[place], ~bit
        if self._delay_s:
            clock, delay_s, news = self._clock, self._delay_s, self._news

            def stored_later(block_id: int) -> None:
                news.append((clock.now_s + delay_s, place, bit, block_id, True))

            def lost_later(block_id: int) -> None:
                news.append((clock.now_s + delay_s, place, bit, block_id, False))

            return stored_later, lost_later

        # once for every block of every prompt: so they do it themselves
        def stored(block_id: int) -> None:
            told[block_id] = told.get(block_id, 0) | bit

        def lost(block_id: int) -> None:
            holders = told.get(block_id, 0) & keep
            if holders:
                told[block_id] = holders
            else:
                told.pop(block_id, None)

        return stored, lost

    def expect(self, bit: int, blocks: Sequence[int]) -> Sent:
        """A prompt with these blocks was sent to a replica. To be `settle`d once it is computed."""
        expected, told = self._expected, self._told[Place.DEVICE]
        missing = [block for block in blocks if not told.get(block, 0) & bit]
        for block in missing:
            expected[block] = expected.get(block, 0) | bit
        sent = Sent(bit, missing, self._clock.now_s + _UNTIL_TOLD_S)
        self._sent.append(sent)
        return sent

    def settle(self, sent: Sent) -> None:
        """What was expected is told of by now, or never will be. Idempotent."""
        keep = ~sent.bit
        expected = self._expected
        for block in sent.blocks:
            holders = expected.get(block, 0) & keep
            if holders:
                expected[block] = holders
            else:
                expected.pop(block, None)
        sent.blocks = ()

    def lookup(self, blocks: Sequence[int], prompt_tokens: int) -> list[Warm]:
        """Who has how much of a prompt's beginning; those that have nothing are left out. A block
        counts for its fastest tier."""
        if self._common is not None:
            tokens = self._common.match(blocks) * self._block_tokens
            cached = _cached(tokens, 0, 0, prompt_tokens)
            return [Warm(self._everybody, cached)] if cached.tokens else []
        self._catch_up()
        device, dram = self._told
        expected, redis = self._expected, self._redis
        open_groups = [(self._everybody, 0, 0, 0)]
        ended: list[tuple[int, int, int, int]] = []
        for block in blocks:
            near = device.get(block, 0) | expected.get(block, 0)
            far = dram.get(block, 0) if dram else 0
            shared = redis is not None and block in redis
            if not (near or far or shared):
                break
            going_on: list[tuple[int, int, int, int]] = []
            for group in open_groups:
                replicas, on_device, in_dram, in_redis = group
                here = replicas & near
                if here:
                    going_on.append((here, on_device + 1, in_dram, in_redis))
                    if here == replicas:
                        continue
                    replicas &= ~near
                here = replicas & far
                if here:
                    going_on.append((here, on_device, in_dram + 1, in_redis))
                    replicas &= ~far
                if not replicas:
                    continue
                if shared:
                    going_on.append((replicas, on_device, in_dram, in_redis + 1))
                elif on_device or in_dram or in_redis:
                    ended.append((replicas, on_device, in_dram, in_redis))
            open_groups = going_on
            if not open_groups:
                break
        else:
            if not blocks:
                return []
        ended += [group for group in open_groups if group[1] or group[2] or group[3]]
        size = self._block_tokens
        return [
            Warm(replicas, _cached(near * size, far * size, shared * size, prompt_tokens))
            for replicas, near, far, shared in ended
        ]

    def _catch_up(self) -> None:
        now_s = self._clock.now_s
        news, sent = self._news, self._sent
        while news and news[0][0] <= now_s:
            _, place, bit, block_id, stored = news.popleft()
            self._apply(place, bit, block_id, stored)
        while sent and (not sent[0].blocks or sent[0].until_s <= now_s):
            self.settle(sent.popleft())

    def _apply(self, place: Place, bit: int, block_id: int, stored: bool) -> None:
        told = self._told[place]
        if stored:
            told[block_id] = told.get(block_id, 0) | bit
            return
        holders = told.get(block_id, 0) & ~bit
        if holders:
            told[block_id] = holders
        else:
            told.pop(block_id, None)


def _cached(device: int, dram: int, redis: int, prompt_tokens: int) -> Cached:
    """Of a prompt, whose last block is filled in part and whose last token is computed always."""
    over = device + dram + redis - (prompt_tokens - 1)
    if over > 0:
        taken = min(over, redis)
        redis, over = redis - taken, over - taken
        taken = min(over, dram)
        dram, over = dram - taken, over - taken
        device -= over
    return Cached(device, dram, redis) if device or dram or redis else NOTHING_CACHED
