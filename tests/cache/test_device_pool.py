"""The page pool: states, sharing, eviction order, and its invariant under random use."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.block import BlockKey
from cache.device_pool import DevicePool, PoolExhausted


def key(number: int, parent: int = 0, tokens: bytes | None = None) -> BlockKey:
    return BlockKey(
        number.to_bytes(16, "little"),
        parent.to_bytes(16, "little"),
        tokens if tokens is not None else number.to_bytes(64, "little"),
    )


def published(pool: DevicePool, keys: list[BlockKey]) -> list[int]:
    pages = pool.take(len(keys))
    for page, each in zip(pages, keys, strict=True):
        pool.publish(page, each)
    return pages


def test_released_blocks_are_found_again():
    pool = DevicePool(4)
    keys = [key(1), key(2, 1)]
    pages = published(pool, keys)
    pool.release(pages)
    assert pool.match(keys) == pages
    assert pool.counts().cached == 2


def test_match_stops_at_the_first_gap():
    pool = DevicePool(4)
    keys = [key(1), key(2, 1), key(3, 2)]
    pages = pool.take(3)
    pool.publish(pages[0], keys[0])
    pool.publish(pages[2], keys[2])
    assert pool.match(keys) == pages[:1]


def test_a_hash_collision_is_a_miss():
    pool = DevicePool(4)
    published(pool, [key(1, tokens=b"a" * 64)])
    assert pool.match([key(1, tokens=b"b" * 64)]) == []
    assert pool.match([key(1, parent=9, tokens=b"a" * 64)]) == []


def test_leaves_are_evicted_before_the_prefix_they_extend():
    pool = DevicePool(3)
    keys = [key(1), key(2, 1), key(3, 2)]
    pool.release(published(pool, keys))
    pool.take(1)
    assert len(pool.match(keys)) == 2


def test_least_recently_released_goes_first():
    pool = DevicePool(2)
    first, second = published(pool, [key(1)]), published(pool, [key(2)])
    pool.release(first)
    pool.release(second)
    pool.hold(first)
    pool.release(first)
    pool.take(1)
    assert pool.match([key(1)])
    assert not pool.match([key(2)])


def test_exhaustion_takes_nothing():
    pool = DevicePool(2)
    pool.take(1)
    with pytest.raises(PoolExhausted):
        pool.take(2)
    assert pool.available() == 1


def test_a_second_publisher_of_the_same_block_keeps_its_page_private():
    pool = DevicePool(3)
    first = published(pool, [key(1)])
    second = published(pool, [key(1)])
    assert pool.match([key(1)]) == first
    pool.release(second)
    assert pool.counts().cached == 0
    pool.check_integrity()


def test_releasing_what_nobody_holds_is_an_error():
    pool = DevicePool(1)
    pages = pool.take(1)
    pool.release(pages)
    with pytest.raises(ValueError, match="not held"):
        pool.release(pages)


class PoolMachine(RuleBasedStateMachine):
    """Random takes, publications, holds and releases against a plain model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = DevicePool(6)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        if count <= self.pool.available():
            self.tables.append(self.pool.take(count))
        else:
            with pytest.raises(PoolExhausted):
                self.pool.take(count)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), start=st.integers(1, 5))
    def publish(self, data: st.DataObject, start: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        for offset, page in enumerate(table):
            self.pool.publish(page, key(start + offset, start + offset - 1))

    @rule(start=st.integers(1, 5), count=st.integers(1, 3))
    def share(self, start: int, count: int) -> None:
        pages = self.pool.match([key(start + i, start + i - 1) for i in range(count)])
        if pages:
            self.pool.hold(pages)
            self.tables.append(pages)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(index))

    @invariant()
    def whole(self) -> None:
        self.pool.check_integrity()
        held = {page for table in self.tables for page in table}
        assert self.pool.counts().held == len(held)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
