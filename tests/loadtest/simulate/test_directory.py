from __future__ import annotations

from random import Random

from loadtest.simulate.clock import Clock
from loadtest.simulate.desk import replica_numbers
from loadtest.simulate.directory import BlockDirectory, Place
from loadtest.simulate.redis_tier import RedisTier
from policies.routing import NOTHING_CACHED, Cached

REPLICAS = 11
SIZE = 16


def by_replica(directory: BlockDirectory, blocks: list[int], tokens: int) -> list[Cached]:
    found = [NOTHING_CACHED] * REPLICAS
    for bits, cached in directory.lookup(blocks, tokens):
        for number in replica_numbers(bits, REPLICAS).tolist():
            assert found[number] is NOTHING_CACHED
            found[number] = cached
    return found


def test_it_finds_what_a_search_of_every_replica_finds() -> None:
    random = Random(2)
    for _ in range(60):
        redis = RedisTier(100)
        directory = BlockDirectory(Clock(), REPLICAS, SIZE, redis=redis)
        blocks = list(range(random.randint(1, 12)))
        chance = random.random()
        held: dict[tuple[Place, int], set[int]] = {}
        for place in Place:
            for number in range(REPLICAS):
                stored, lost = directory.tellers(place, 1 << number)
                own = held[place, number] = set()
                for block in blocks:
                    if random.random() < chance:
                        stored(block)
                        own.add(block)
                    if random.random() < 0.1:
                        lost(block)
                        own.discard(block)
        for block in blocks:
            if random.random() < 0.3:
                redis.store(block)
        tokens = len(blocks) * SIZE + random.choice((-5, 0, 40))
        for number, cached in enumerate(by_replica(directory, blocks, tokens)):
            device = dram = shared = 0
            for block in blocks:
                if block in held[Place.DEVICE, number]:
                    device += 1
                elif block in held[Place.DRAM, number]:
                    dram += 1
                elif block in redis:
                    shared += 1
                else:
                    break
            assert cached.tokens == min((device + dram + shared) * SIZE, tokens - 1)
            assert cached.device <= device * SIZE
            assert cached.device + cached.dram <= (device + dram) * SIZE


def test_what_was_sent_counts_until_it_is_told_or_too_old() -> None:
    clock = Clock()
    directory = BlockDirectory(clock, REPLICAS, SIZE)
    first = directory.expect(1 << 2, [1, 2, 3])
    directory.expect(1 << 5, [1, 2])
    found = by_replica(directory, [1, 2, 3, 4], 64)
    assert (found[2], found[5]) == (Cached(48), Cached(32))
    stored, _ = directory.tellers(Place.DEVICE, 1 << 2)
    stored(1)
    directory.settle(first)
    assert by_replica(directory, [1, 2, 3, 4], 64)[2] == Cached(16)
    clock.now_s = 8.0
    assert by_replica(directory, [1, 2, 3, 4], 64)[5] == NOTHING_CACHED


def test_news_come_as_late_as_they_are() -> None:
    clock = Clock()
    directory = BlockDirectory(clock, REPLICAS, SIZE, delay_s=2.0)
    stored, lost = directory.tellers(Place.DEVICE, 1)
    stored(7)
    clock.now_s = 1.0
    lost(7)
    assert directory.lookup([7], 99) == []
    clock.now_s = 2.0
    assert by_replica(directory, [7], 99)[0] == Cached(16)
    clock.now_s = 3.0
    assert directory.lookup([7], 99) == []
