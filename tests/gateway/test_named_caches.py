"""The registry of named prefixes: time, names, bytes, erasure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block import Owner
from gateway.errors import ApiError
from gateway.named_cache import NamedCache, Place, Record, deleted, stored
from gateway.named_cache_store import MemoryStore, WorkingCopy
from gateway.named_caches import MAX_NAMES, Allowance, NamedCaches

SECRET = b"server secret"
PLENTY = Allowance(None, 1 << 40)


@dataclass
class Clock:
    now_s: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def registry(clock: Clock | None = None) -> NamedCaches:
    return NamedCaches(MemoryStore(), SECRET, clock=clock or Clock())


def entry(
    owner: Owner,
    name: str = "handbook",
    *,
    text: str = "text",
    kv_bytes: int = 100,
    expires_s: float = 1_000_060.0,
    model: str = "m",
) -> NamedCache:
    return NamedCache(
        place=Place(owner, name),
        model=model,
        messages=({"role": "system", "content": text},),
        tokens=10,
        kv_bytes=kv_bytes,
        cached_tokens=0,
        created_s=1_000_000.0,
        expires_s=expires_s,
    )


async def make(named: NamedCaches, cache: NamedCache, allowance: Allowance = PLENTY) -> None:
    with named.making(cache, allowance) as making:
        await named.keep(making, cache)


async def test_a_name_lives_until_its_time_is_over() -> None:
    clock = Clock()
    named = registry(clock)
    owner = named.owner("acme", None)
    cache = entry(owner)
    await make(named, cache)
    clock.now_s += 59.9
    assert await named.find(owner, "handbook") == cache
    clock.now_s += 0.1
    assert await named.find(owner, "handbook") is None
    assert await named.live(owner) == []
    # and then it is free for another content
    await make(named, entry(owner, text="other", expires_s=clock.now_s + 60))


async def test_an_abandoned_making_holds_nothing() -> None:
    named = registry()
    owner = named.owner("acme", None)
    with pytest.raises(RuntimeError), named.making(entry(owner), Allowance(100, 0)):
        raise RuntimeError
    assert await named.find(owner, "handbook") is None
    await make(named, entry(owner, "other"), Allowance(100, 0))


async def test_bytes_being_made_count() -> None:
    named = registry()
    owner = named.owner("acme", None)
    with named.making(entry(owner, "one"), Allowance(150, 0)):
        with pytest.raises(ApiError, match="dram_quota") as refused:
            await make(named, entry(owner, "two"), Allowance(150, 0))
        assert refused.value.status == 409


async def test_another_models_prefixes_lie_in_another_tier() -> None:
    named = registry()
    owner = named.owner("acme", None)
    await make(named, entry(owner, "one"), Allowance(100, 0))
    await make(named, entry(owner, "two", model="n"), Allowance(100, 0))


async def test_a_tenant_has_so_many_names() -> None:
    named = registry()
    ann, bob = named.owner("acme", "ann"), named.owner("acme", "bob")
    for i in range(MAX_NAMES):
        await make(named, entry(ann if i % 2 else bob, f"n{i}"))
    with pytest.raises(ApiError) as refused:
        await make(named, entry(ann, "more"))
    assert (refused.value.status, refused.value.code) == (409, "too_many_caches")
    await make(named, entry(named.owner("beta", None), "more"))
    await make(named, entry(bob, "n0", expires_s=1_000_100.0))  # extending needs no place
    assert await named.delete(bob, "n0")
    await make(named, entry(ann, "more"))


async def test_erasing_a_tenant_or_one_user() -> None:
    named = registry()
    ann, bob = named.owner("acme", "ann"), named.owner("acme", "bob")
    other = named.owner("beta", None)
    for owner in (ann, bob, other):
        await make(named, entry(owner))
    assert await named.erase_tenant("acme", "ann") == (1, True)
    assert await named.find(ann, "handbook") is None
    assert await named.find(bob, "handbook") is not None
    assert await named.erase_tenant("acme", None) == (1, True)
    assert await named.erase_tenant("acme", None) == (0, True)
    assert await named.find(other, "handbook") is not None


async def test_what_is_being_made_during_an_erasure_is_not_kept() -> None:
    named = registry()
    owner = named.owner("acme", None)
    cache = entry(owner)
    with named.making(cache, PLENTY) as making:
        await named.erase_tenant("acme", None)
        with pytest.raises(ApiError) as refused:
            await named.keep(making, cache)
    assert refused.value.code == "cache_erased"
    assert await named.live(owner) == []


async def test_what_is_deleted_while_it_is_extended_does_not_come_back() -> None:
    clock = Clock()
    named = registry(clock)
    owner = named.owner("acme", None)
    cache = entry(owner)
    await make(named, cache)
    with named.making(replace(cache, expires_s=2_000_000.0), PLENTY) as making:
        assert await named.delete(owner, "handbook")
        clock.now_s += 3600  # also once what was deleted has expired
        await named.live(owner)
        with pytest.raises(ApiError) as refused:
            await named.keep(making, making.cache)
    assert (refused.value.status, refused.value.code) == (409, "cache_erased")
    assert await named.live(owner) == []
    await make(named, entry(owner, text="other", expires_s=2_000_000.0))


async def test_nor_what_another_gateway_deletes_meanwhile() -> None:
    store, clock = MemoryStore(), Clock()
    here, there = (NamedCaches(store, SECRET, clock=clock) for _ in range(2))
    owner = here.owner("acme", None)
    cache = entry(owner)
    await make(here, cache)
    longer = replace(cache, expires_s=2_000_000.0)
    with here.making(longer, PLENTY) as making:
        assert await there.delete(owner, "handbook")
        with pytest.raises(ApiError):
            await here.keep(making, longer)
    assert await there.live(owner) == []
    await make(here, longer)  # a name that was deleted before can be made anew
    assert await there.live(owner) == [longer]


async def test_who_gave_up_a_name_does_not_take_it_from_who_makes_it_now() -> None:
    named = registry()
    owner = named.owner("acme", None)
    cache = entry(owner)
    with named.making(cache, PLENTY) as first:
        await named.erase_tenant("acme", None)
        with named.making(cache, PLENTY) as second:
            with pytest.raises(ApiError):
                await named.keep(first, cache)
            await named.keep(second, cache)
    assert await named.live(owner) == [cache]


OWNERS = [NamedCaches(MemoryStore(), SECRET).owner(*who) for who in (("a", None), ("b", None))]
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("make"),
            st.integers(0, 1),
            st.sampled_from("xyz"),
            st.integers(1, 60),
            st.integers(60, 300),
        ),
        st.tuples(st.just("delete"), st.integers(0, 1), st.sampled_from("xyz")),
        st.tuples(st.just("erase"), st.integers(0, 1)),
        st.tuples(st.just("wait"), st.integers(1, 200)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.booleans())
async def test_agrees_with_a_plain_model(steps: list[tuple[object, ...]], quotas: bool) -> None:
    """Never more bytes than allowed, nothing after its time, nothing of anybody else's."""
    clock = Clock()
    named = registry(clock)
    allowance = Allowance(100, 0) if quotas else Allowance(None, 100)
    model: dict[tuple[int, str], tuple[int, float]] = {}
    for step in steps:
        match step:
            case ("make", int(who), str(name), int(size), int(ttl_s)):
                expires_s = clock.now_s + ttl_s
                counted = {
                    key: kept
                    for key, kept in model.items()
                    if key != (who, name) and (key[0] == who or not quotas)
                }
                fits = sum(kept[0] for kept in counted.values()) + size <= 100
                cache = entry(OWNERS[who], name, kv_bytes=size, expires_s=expires_s)
                if fits:
                    await make(named, cache, allowance)
                    model[who, name] = (size, expires_s)
                else:
                    with pytest.raises(ApiError, match="does not fit"):
                        await make(named, cache, allowance)
            case ("delete", int(who), str(name)):
                assert await named.delete(OWNERS[who], name) == ((who, name) in model)
                model.pop((who, name), None)
            case ("erase", int(who)):
                gone = [key for key in model if key[0] == who]
                assert await named.erase_tenant("ab"[who], None) == (len(gone), True)
                for key in gone:
                    del model[key]
            case ("wait", int(seconds)):
                clock.now_s += seconds
        model = {key: kept for key, kept in model.items() if kept[1] > clock.now_s}
        for who, owner in enumerate(OWNERS):
            live = await named.live(owner)
            assert [(who, each.place.name) for each in live] == sorted(
                key for key in model if key[0] == who
            )
            for each in live:
                assert model[who, each.place.name] == (each.kv_bytes, each.expires_s)


PLACE = Place(OWNERS[0], "x")
RECORDS = st.builds(
    lambda changed_s, kept, ttl_s: Record(
        PLACE,
        changed_s,
        changed_s + ttl_s,
        entry(OWNERS[0], "x", expires_s=changed_s + ttl_s) if kept else None,
    ),
    st.integers(0, 3).map(float),
    st.booleans(),
    st.integers(1, 3).map(float),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(RECORDS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_gateways_agree_whatever_order_records_arrive_in(records, random) -> None:
    one, other = WorkingCopy(), WorkingCopy()
    for record in records:
        one.merge(record)
    random.shuffle(records)
    for record in records:
        other.merge(record)
    assert one.get(PLACE) == other.get(PLACE)


def test_a_change_is_later_than_the_one_before_it_whatever_the_clocks_say() -> None:
    cache = entry(OWNERS[0])
    ahead = stored(cache, 2_000_000.0, None)
    extended = stored(replace(cache, expires_s=9e6), 1_000_000.0, ahead)
    gone = deleted(extended, 1_000_000.0)
    assert extended.outdoes(ahead)
    assert gone.outdoes(extended)
    assert not ahead.outdoes(gone)
