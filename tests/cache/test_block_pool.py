"""The block pool: states, sharing, eviction order, floors, quotas, retention, erasure."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block import NOBODY, BlockKey, Owner
from cache.block_pool import BlockPool, PoolExhausted, Share

A, B = b"tenant-a", b"tenant-b"
SCOPE = b"user-one"


def key(
    number: int,
    parent: int = 0,
    *,
    tenant: bytes = NOBODY.tenant,
    scope: bytes = NOBODY.scope,
    tokens: bytes | None = None,
) -> BlockKey:
    return BlockKey(
        number.to_bytes(16, "little"),
        parent.to_bytes(16, "little"),
        tokens if tokens is not None else number.to_bytes(64, "little"),
        owner=Owner(tenant, scope),
    )


def chain(first: int, blocks: int, tenant: bytes = NOBODY.tenant) -> list[BlockKey]:
    """Keys `first`, `first + 1`, ...; the first one's parent is in no pool."""
    return [
        key(number, 0 if number == first else number - 1, tenant=tenant)
        for number in range(first, first + blocks)
    ]


def published(
    pool: BlockPool,
    keys: list[BlockKey],
    saving_s: float = 1.0,
    *,
    hits: int = 0,
    keep_until_s: float = 0.0,
) -> list[int]:
    """Held blocks with these names."""
    indices = pool.take(len(keys), keys[0].owner.tenant)
    for index, each in zip(indices, keys, strict=True):
        assert pool.publish(index, each, saving_s=saving_s, hits=hits, keep_until_s=keep_until_s)
    return indices


def cached(
    pool: BlockPool,
    keys: list[BlockKey],
    saving_s: float = 1.0,
    *,
    hits: int = 0,
    keep_until_s: float = 0.0,
) -> list[int]:
    """Blocks with these names that nobody holds."""
    indices = published(pool, keys, saving_s, hits=hits, keep_until_s=keep_until_s)
    pool.release(indices)
    return indices


def evict(pool: BlockPool, count: int = 1, tenant: bytes = NOBODY.tenant) -> None:
    """Push `count` blocks out of a full pool, and leave their places free."""
    assert pool.counts().free == 0
    pool.release(pool.take(count, tenant))


def test_released_blocks_are_found_again():
    pool = BlockPool(4)
    keys = chain(1, 2)
    indices = cached(pool, keys)
    assert pool.match(keys) == indices
    assert pool.find(keys[1]) == indices[1]
    assert pool.counts().cached == 2


def test_match_stops_at_the_first_gap_and_find_does_not():
    pool = BlockPool(4)
    keys = chain(1, 3)
    indices = published(pool, keys)
    pool.drop(indices[1])
    assert pool.match(keys) == indices[:1]
    assert pool.find(keys[2]) == indices[2]
    assert pool.find(keys[1]) is None


@pytest.mark.parametrize(
    "other",
    [
        key(1, tokens=b"b" * 64),
        key(1, parent=9, tokens=b"a" * 64),
        key(1, tenant=A, tokens=b"a" * 64),
    ],
)
def test_a_hash_collision_is_a_miss(other: BlockKey):
    pool = BlockPool(4)
    mine = key(1, tokens=b"a" * 64)
    index = published(pool, [mine])[0]
    assert pool.match([other]) == []
    assert pool.find(other) is None
    (private,) = pool.take(1)
    assert not pool.publish(private, other, saving_s=1.0, hits=5)
    assert pool.hits_of(index) == 0
    assert pool.key_of(private) is None


def test_exhaustion_takes_nothing():
    pool = BlockPool(2)
    pool.take(1)
    with pytest.raises(PoolExhausted):
        pool.take(2)
    assert pool.available() == 1


def test_a_second_publisher_of_the_same_block_keeps_its_own_private():
    pool = BlockPool(3)
    first = published(pool, [key(1)], hits=2, keep_until_s=5.0)
    second = pool.take(1)
    assert not pool.publish(second[0], key(1), saving_s=1.0, hits=1, keep_until_s=9.0)
    assert pool.match([key(1)]) == first
    assert (pool.hits_of(first[0]), pool.keep_until_of(first[0])) == (2, 9.0)
    pool.release(second)
    assert pool.counts().cached == 0
    pool.check_integrity()


def test_publishing_again_is_the_same_publication():
    pool = BlockPool(1)
    (index,) = published(pool, [key(1)])
    assert pool.publish(index, key(1), saving_s=1.0, hits=4)
    assert pool.hits_of(index) == 4
    with pytest.raises(ValueError, match="another name"):
        pool.publish(index, key(2), saving_s=1.0)


def test_wrong_use_is_an_error():
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="neither held nor cached"):
        pool.hold([0])
    with pytest.raises(ValueError, match="not held"):
        pool.publish(0, key(1), saving_s=1.0)
    indices = pool.take(1)
    for saving_s in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="saving_s"):
            pool.publish(0, key(1), saving_s=saving_s)
    with pytest.raises(ValueError, match="extend itself"):
        pool.publish(0, key(1, 1), saving_s=1.0)
    pool.release(indices)
    with pytest.raises(ValueError, match="not held"):
        pool.release(indices)
    with pytest.raises(ValueError, match="count"):
        pool.take(-1)
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)
    with pytest.raises(ValueError, match="no floor"):
        pool.set_shares({NOBODY.tenant: Share(floor=1)})
    with pytest.raises(ValueError, match="floor"):
        Share(floor=-1)
    with pytest.raises(ValueError, match="quota"):
        Share(quota=-1)


def test_leaves_go_before_the_prefix_they_extend():
    pool = BlockPool(3)
    keys = chain(1, 3)
    indices = cached(pool, keys)
    pool.touch(indices[2:])
    assert pool.next_victims(3, 0.0) == indices[::-1]
    evict(pool)
    assert len(pool.match(keys)) == 2


def test_a_parent_that_comes_after_its_child_still_goes_after_it():
    pool = BlockPool(2)
    keys = chain(1, 2)
    (child,) = cached(pool, keys[1:], saving_s=9.0)
    (parent,) = cached(pool, keys[:1], saving_s=1.0)
    assert pool.next_victims(2, 0.0) == [child, parent]


def test_a_held_block_keeps_what_it_extends():
    pool = BlockPool(4)
    indices = cached(pool, chain(1, 3))
    pool.hold(indices[2:])
    assert pool.available() == 1
    with pytest.raises(PoolExhausted):
        pool.take(2)
    pool.drop(indices[2])
    assert pool.available() == 3
    assert pool.counts().cached == 2


def test_the_least_recently_used_goes_first_among_equals():
    pool = BlockPool(2)
    first, second = cached(pool, [key(1)]), cached(pool, [key(2)])
    pool.touch(first)
    pool.touch(second)
    pool.touch(second)
    pool.touch(first)
    assert pool.next_victims(2, 0.0) == second + first


def test_a_transfer_that_holds_a_block_does_not_count_as_a_use():
    pool = BlockPool(2)
    first, second = cached(pool, [key(1)]), cached(pool, [key(2)])
    pool.hold(first)
    pool.release(first, used=False)
    assert pool.next_victims(2, 0.0) == first + second
    pool.hold(first)
    pool.hold(first)
    pool.release(first)
    pool.release(first, used=False)  # outlasts a use, which is not forgotten for that
    assert pool.next_victims(2, 0.0) == second + first


def test_a_block_that_only_a_transfer_held_has_the_worth_it_was_published_with():
    pool = BlockPool(2)
    dear = published(pool, [key(1)], saving_s=2.0)
    cheap = published(pool, [key(2)], saving_s=1.0)
    pool.release(dear, used=False)
    pool.release(cheap, used=False)
    assert pool.next_victims(2, 0.0) == cheap + dear


def test_a_use_counts_from_its_end():
    pool = BlockPool(3)
    first, second = cached(pool, [key(1)], saving_s=2.0), cached(pool, [key(2)], saving_s=3.0)
    pool.hold(first)
    cached(pool, [key(3)], saving_s=1.5)
    evict(pool)  # the clock is 1.5
    pool.release(first)
    assert pool.next_victims(2, 0.0) == second + first


def test_hits_and_recompute_time_weigh():
    pool = BlockPool(3)
    cheap = cached(pool, [key(1)], saving_s=1.0)
    dear = cached(pool, [key(2)], saving_s=3.5)
    popular = cached(pool, [key(3)], saving_s=1.0, hits=2)
    assert pool.next_victims(3, 0.0) == cheap + popular + dear
    pool.touch(popular)
    assert pool.next_victims(3, 0.0) == cheap + dear + popular
    assert pool.hits_of(popular[0]) == 3


def test_what_is_no_longer_asked_for_ages():
    pool = BlockPool(2)
    favourite = key(1)
    cached(pool, [favourite], saving_s=1.0, hits=4)
    for number in range(2, 7):
        cached(pool, [key(number)], saving_s=1.0)
        assert pool.find(favourite) is not None
    cached(pool, [key(7)], saving_s=1.0)
    assert pool.find(favourite) is None


def test_kept_blocks_go_last_the_first_to_expire_first():
    pool = BlockPool(3)
    pool.set_time(100.0)
    late = cached(pool, [key(1)], keep_until_s=300.0)
    early = cached(pool, [key(2)], saving_s=50.0)
    pool.keep(early, 200.0)
    pool.keep(early, 150.0)  # never shorter
    plain = cached(pool, [key(3)], saving_s=99.0)
    assert pool.keep_until_of(early[0]) == 200.0
    assert pool.next_victims(3, 100.0) == plain + early + late
    assert pool.next_victims(3, 250.0) == early + plain + late
    assert pool.next_victims(3, 300.0) == late + early + plain
    assert len(pool.take(3)) == 3


def test_keeping_what_is_not_published_has_no_effect():
    pool = BlockPool(1)
    indices = pool.take(1)
    pool.keep(indices, 9.0)
    pool.touch(indices)
    assert (pool.key_of(0), pool.hits_of(0), pool.keep_until_of(0)) == (None, 0, 0.0)


def test_eviction_is_told_while_the_block_can_still_be_asked_about():
    told: list[tuple[int, BlockKey, int]] = []
    pool = BlockPool(
        2, on_evict=lambda index, gone: told.append((index, gone, pool.hits_of(index)))
    )
    keys = chain(1, 2)
    indices = cached(pool, keys, hits=3)
    taken = pool.take(2)
    assert told == [(indices[1], keys[1], 3), (indices[0], keys[0], 3)]
    assert sorted(taken) == sorted(indices)
    assert pool.evictions == 2


def test_a_floor_is_not_taken_from_by_others():
    pool = BlockPool(4)
    pool.set_shares({A: Share(floor=2)})
    mine = chain(1, 3, A)
    cached(pool, mine)
    assert pool.available(B) == pool.available() == 2
    assert pool.available(A) == 4
    pool.take(2, B)
    assert len(pool.match(mine)) == 2
    with pytest.raises(PoolExhausted):
        pool.take(1, B)
    assert len(pool.take(2, A)) == 2  # its own, it may
    pool.check_integrity()


def test_a_tenant_at_its_floor_gives_to_itself_what_is_worth_least():
    pool = BlockPool(3)
    pool.set_shares({A: Share(floor=2)})
    mine = cached(pool, chain(1, 2, A), saving_s=1.0)
    cached(pool, [key(9, tenant=B)], saving_s=5.0)
    assert pool.take(2, A) == mine


def test_held_blocks_count_for_the_floor():
    pool = BlockPool(4)
    pool.set_shares({A: Share(floor=2)})
    published(pool, [key(1, tenant=A), key(2, tenant=A)])
    cached(pool, [key(3, tenant=A), key(4, tenant=A)])
    assert pool.available(B) == 2


def test_a_floor_is_lifted_at_once():
    pool = BlockPool(2)
    pool.set_shares({A: Share(floor=2)})
    cached(pool, chain(1, 2, A))
    assert pool.available(B) == 0
    pool.set_shares({})
    assert pool.available(B) == 2


def test_a_quota_pushes_out_the_tenants_own_least_valuable_leaves():
    told: list[BlockKey] = []
    pool = BlockPool(8, on_evict=lambda _, gone: told.append(gone))
    pool.set_shares({A: Share(quota=2)})
    other = cached(pool, [key(9, tenant=B)], saving_s=0.0)
    mine = chain(1, 3, A)
    indices = published(pool, mine)
    assert pool.counts().held == 3  # held blocks are not counted
    pool.release(indices)
    assert told == mine[2:]
    assert pool.find(key(9, tenant=B)) == other[0]
    assert pool.counts().free == 5
    pool.set_shares({A: Share(quota=0)})
    assert told == mine[::-1]
    assert pool.tenant_blocks() == {B: 1}


def test_a_quota_binds_kept_blocks_too():
    pool = BlockPool(4)
    pool.set_shares({A: Share(quota=1)})
    first = cached(pool, [key(1, tenant=A)], keep_until_s=10.0)
    cached(pool, [key(2, tenant=A)])
    assert pool.find(key(1, tenant=A)) == first[0]
    cached(pool, [key(3, tenant=A)], keep_until_s=20.0)
    assert pool.tenant_blocks() == {A: 1}
    assert pool.find(key(3, tenant=A)) is not None


def test_a_quota_waits_for_what_is_pinned():
    pool = BlockPool(4)
    pool.set_shares({A: Share(quota=0)})
    indices = published(pool, chain(1, 2, A))
    pool.release(indices[:1])
    assert pool.counts().cached == 1
    pool.release(indices[1:])
    assert pool.counts().free == 4


def test_a_small_quotas_turnover_ages_its_own_tenant_only():
    pool = BlockPool(4)
    pool.set_shares({A: Share(quota=1)})
    theirs = cached(pool, [key(1, tenant=B)], saving_s=1.0, hits=2)
    favourite = cached(pool, [key(2, tenant=A)], saving_s=1.0, hits=2)
    assert favourite
    for number in range(10, 40):
        cached(pool, [key(number, tenant=A)], saving_s=1.0)
    assert pool.find(key(2, tenant=A)) is None  # its own favourite has aged
    newest = pool.find(key(39, tenant=A))
    fresh = cached(pool, [key(3, tenant=B)], saving_s=2.0)
    assert newest is not None
    assert pool.next_victims(3, 0.0) == [newest, *fresh, *theirs]


def test_erasure_spares_other_tenants_and_scopes():
    pool = BlockPool(6)
    cached(pool, [key(1, tenant=A)])
    (held,) = published(pool, [key(2, tenant=A, scope=SCOPE)])
    cached(pool, [key(3, tenant=A, scope=SCOPE)])
    cached(pool, [key(4, tenant=B, scope=SCOPE)])
    assert {gone.link[0] for _, gone in pool.drop_owned(A, SCOPE)} == {2, 3}
    assert pool.tenant_blocks() == {A: 1, B: 1}
    assert pool.counts().held == 1
    assert [gone.link[0] for _, gone in pool.drop_owned(A, None)] == [1]
    assert pool.drop_owned(b"stranger", None) == []
    pool.release([held])
    assert pool.counts().free == 5
    assert len(pool.clear()) == 1
    assert pool.counts().free == 6
    assert pool.evictions == 0
    pool.check_integrity()


def test_dropping_frees_what_nobody_holds():
    pool = BlockPool(3)
    indices = cached(pool, chain(1, 2))
    pool.hold(indices[:1])
    pool.drop(indices[0])
    pool.drop(indices[0])
    assert pool.match(chain(1, 2)) == []
    pool.release(indices[:1])
    pool.drop(indices[1])
    assert pool.counts().free == 3


def test_everything_cached_is_listed_whatever_the_floors():
    pool = BlockPool(3)
    pool.set_shares({A: Share(floor=2)})
    mine = cached(pool, chain(1, 2, A), saving_s=2.0)
    theirs = cached(pool, [key(5, tenant=B)])
    assert pool.next_victims(3, 0.0) == theirs
    assert pool.cached_in_order(0.0) == theirs + mine[::-1]


def test_time_does_not_go_back():
    pool = BlockPool(2)
    kept = cached(pool, [key(1)], keep_until_s=10.0)
    plain = cached(pool, [key(2)], saving_s=2.0)
    pool.set_time(11.0)
    pool.set_time(5.0)
    assert pool.next_victims(2, 5.0) == kept + plain
    pool.check_integrity()


@settings(max_examples=40, deadline=None)
@given(
    chains=st.lists(
        st.tuples(
            st.sampled_from([A, B, NOBODY.tenant]),
            st.integers(1, 6),
            st.floats(0.0, 10.0),
            st.integers(0, 3),
            st.sampled_from([0.0, 0.0, 50.0, 60.0]),
        ),
        min_size=1,
        max_size=8,
    ),
    floors=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    count=st.integers(0, 60),
)
def test_victims_are_foreseen_exactly(
    chains: list[tuple[bytes, int, float, int, float]], floors: tuple[int, int], count: int
):
    gone: list[int] = []
    pool = BlockPool(
        sum(blocks for _, blocks, *_ in chains), on_evict=lambda index, _: gone.append(index)
    )
    pool.set_shares({A: Share(floor=floors[0]), B: Share(floor=floors[1])})
    for number, (tenant, blocks, saving_s, hits, until_s) in enumerate(chains):
        keys = chain(100 * number + 1, blocks, tenant)
        cached(pool, keys, saving_s, hits=hits, keep_until_s=until_s)
    foreseen = pool.next_victims(count, 55.0)
    assert len(foreseen) == min(count, pool.available())
    pool.take(len(foreseen))
    assert gone == foreseen
    pool.check_integrity()


def test_no_more_than_the_bound_is_kept_and_the_deepest_of_equals_is_lost_first():
    pool = BlockPool(6, keep_at_most=2)
    pool.set_time(1.0)
    first = cached(pool, [placed(1, 0, 0), placed(2, 1, 16), placed(3, 2, 32)], keep_until_s=9.0)
    assert [pool.keep_until_of(index) for index in first] == [9.0, 9.0, 0.0]
    later = cached(pool, [placed(4, 0, 0)], keep_until_s=20.0)
    assert [pool.keep_until_of(index) for index in first + later] == [9.0, 0.0, 0.0, 20.0]
    sooner = cached(pool, [placed(5, 0, 0)], keep_until_s=5.0)
    assert pool.keep_until_of(sooner[0]) == 0.0
    pool.check_integrity()
    assert pool.next_victims(5, 1.0) == [first[2], first[1], *sooner, first[0], *later]


def test_what_has_expired_or_gone_makes_room_to_keep():
    pool = BlockPool(4, keep_at_most=1)
    gone = cached(pool, [key(1)], keep_until_s=9.0)
    pool.drop(gone[0])
    expired = cached(pool, [key(2)], keep_until_s=5.0)
    pool.set_time(6.0)
    kept = cached(pool, [key(3)], keep_until_s=8.0)
    assert pool.keep_until_of(kept[0]) == 8.0
    pool.keep(expired, 7.0)  # the first to expire again
    assert [pool.keep_until_of(index) for index in expired + kept] == [0.0, 8.0]
    pool.check_integrity()


def test_who_keeps_most_gives_to_who_keeps_less():
    pool = BlockPool(8, keep_at_most=4)
    greedy = [cached(pool, [key(n, tenant=A)], keep_until_s=100.0 + n)[0] for n in range(1, 6)]
    assert sum(pool.keep_until_of(index) > 0 for index in greedy) == 4
    modest = [cached(pool, [key(n, tenant=B)], keep_until_s=9.0)[0] for n in range(11, 14)]
    assert sum(pool.keep_until_of(index) > 0 for index in greedy) == 2
    assert [pool.keep_until_of(index) > 0 for index in modest] == [False, True, True]
    pool.check_integrity()


def test_a_pool_that_may_keep_nothing_keeps_nothing():
    pool = BlockPool(1, keep_at_most=0)
    only = cached(pool, [key(1)], keep_until_s=9.0)
    assert pool.keep_until_of(only[0]) == 0.0
    pool.check_integrity()


def placed(number: int, parent: int, start: int) -> BlockKey:
    """A key that says where in its prompt the block begins."""
    return replace(key(number, parent), start=start)
