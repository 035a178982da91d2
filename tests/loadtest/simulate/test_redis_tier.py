from __future__ import annotations

from loadtest.simulate.redis_tier import RedisTier


def test_the_least_recently_used_goes_first() -> None:
    redis = RedisTier(3)
    for block in (1, 2, 3):
        redis.store(block)
    redis.read(1)
    redis.read(9)
    redis.store(2)
    redis.store(4)
    assert [block in redis for block in (1, 2, 3, 4, 9)] == [True, True, False, True, False]
    assert (len(redis), redis.evictions) == (3, 1)
