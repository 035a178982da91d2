"""Whose blocks Redis holds: quotas, erasure, the census."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cache.block import Owner
from cache.envelope import KEY_PREFIX
from cache.redis_census import Census, Holding, KeyCount
from tests.cache.redis_blocks import (
    ACME,
    BETA,
    PAYLOAD_BYTES,
    Once,
    block_keys,
    buffers,
    envelope,
    fetch,
    filled_slots,
    probe,
    running_store,
    save,
    until,
)
from tests.cache.valkey import Valkey, running_valkey


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as server:
        yield server


def test_quota_bounds_a_tenant_and_no_other(server: Valkey) -> None:
    with running_store(server.url) as store:
        shape = envelope(store)
        tier = store.tier(shape)
        tier.set_quotas({ACME.tenant: 3 * shape.value_bytes})
        slots = filled_slots(shape, 5)
        assert save(tier, block_keys(5), slots) == (True, True, True, False, False)
        assert save(tier, block_keys(2, seed=1), slots[:2]) is None
        assert save(tier, block_keys(5, BETA), slots) == (True,) * 5
        counters = tier.stats()
        assert counters.dropped == {"quota": 4}
        assert counters.census_bytes == {
            ACME.tenant: 3 * shape.value_bytes,
            BETA.tenant: 5 * shape.value_bytes,
        }
        assert tier.erase(ACME.tenant).result(5) == 3
        assert save(tier, block_keys(3, seed=2), slots[:3]) == (True,) * 3


def test_a_census_finds_what_others_stored(server: Valkey) -> None:
    small, large = envelope(), envelope(identity=b"z" * 32, payload_bytes=3 * PAYLOAD_BYTES)
    with running_store(server.url) as store:
        save(store.tier(small), block_keys(4), filled_slots(small, 4))
        save(store.tier(large), block_keys(2), filled_slots(large, 2))
        save(store.tier(small), block_keys(1, BETA), filled_slots(small, 1))
    with running_store(server.url) as store:
        tier, other = store.tier(small), store.tier(large)
        of_small = {ACME.tenant: 4 * small.value_bytes, BETA.tenant: small.value_bytes}
        until(lambda: tier.stats().census_bytes == of_small)
        of_large = 2 * large.value_bytes
        assert other.stats().census_bytes == {ACME.tenant: of_large}
        # a quota is for all models together
        tier.set_quotas({ACME.tenant: of_small[ACME.tenant] + of_large})
        assert save(tier, block_keys(1, seed=3), filled_slots(small, 1)) is None


def test_erasing_a_tenant_spares_the_others(server: Valkey) -> None:
    with running_store(server.url) as store:
        shape, other = envelope(store), envelope(store, identity=b"z" * 32)
        tier = store.tier(shape)
        slots = filled_slots(shape, 5)
        save(tier, block_keys(5), slots)
        save(store.tier(other), block_keys(2), slots[:2])
        save(tier, block_keys(5, BETA), slots)
        assert tier.erase(ACME.tenant).result(5) == 7
        assert probe(tier, block_keys(5)).present == (False,) * 5
        assert probe(store.tier(other), block_keys(2)).present == (False, False)
        assert fetch(tier, block_keys(5, BETA), buffers(shape, 5)).outcomes == (None,) * 5
        assert tier.erase(ACME.tenant).result(5) == 0


def test_erasing_one_user(server: Valkey) -> None:
    with running_store(server.url) as store:
        shape = envelope(store)
        tier = store.tier(shape)
        ann, bob = Owner(ACME.tenant, b"ann_____"), Owner(ACME.tenant, b"bob_____")
        for owner in (ann, bob):
            save(tier, block_keys(3, owner), filled_slots(shape, 3))
        assert tier.erase(ACME.tenant, ann.scope).result(5) == 3
        assert probe(tier, block_keys(3, ann)).present == (False,) * 3
        assert probe(tier, block_keys(3, bob)).present == (True,) * 3
        # counted at once, not at the next regular count: a quota has its room again
        until(lambda: tier.stats().census_bytes == {ACME.tenant: 3 * shape.value_bytes})
        with pytest.raises(ValueError, match="scope: needs a tenant"):
            tier.erase(None, ann.scope)


def test_flushing_a_model_spares_other_models_and_other_keys(server: Valkey) -> None:
    with running_store(server.url) as store, server.client() as client:
        shape, other = envelope(store), envelope(store, identity=b"z" * 32)
        client.set("limits:acme", 1)
        save(store.tier(shape), block_keys(1500), filled_slots(shape, 1) * 1500)
        save(store.tier(other), block_keys(2), filled_slots(other, 2))
        assert store.tier(shape).erase(None).result(10) == 1500
        assert store.tier(shape).stats().census_bytes == {}
        assert store.tier(other).stats().census_bytes == {ACME.tenant: 2 * other.value_bytes}
        assert len(list(client.scan_iter(KEY_PREFIX + b"*"))) == 2
        assert client.get("limits:acme") == b"1"


def test_what_waits_to_be_stored_is_erased_too(server: Valkey) -> None:
    with running_store(server.url) as store, server.client() as client:
        shape = envelope(store, payload_bytes=2 << 20)
        tier = store.tier(shape)
        keys = [*block_keys(8), *block_keys(1, BETA)]
        slots = filled_slots(shape, 9)
        done = Once()
        server.freeze()
        try:
            assert tier.store(list(zip(keys, slots, strict=True)), done)
            erasure = tier.erase(ACME.tenant)
        finally:
            server.thaw()
        erasure.result(5)
        fates = done.wait()
        assert fates[8]
        assert not all(fates[:8])
        assert len(list(client.scan_iter(KEY_PREFIX + b"*"))) == 1


def test_census_counts_and_gives_back() -> None:
    a, b, c = (Holding(b"model", tenant) for tenant in (b"a", b"b", b"c"))
    census = Census()
    census.set_quotas({b"a": 10})
    assert census.reserve(a, 6)
    assert not census.reserve(a, 6)
    assert census.reserve(b, 600)
    census.give_back(a, 6)
    assert census.reserve(a, 10)
    census.stored(a, 10)
    census.stored(b, 600)
    assert census.reserve(b, 7)
    mark = census.start_count()
    census.stored(b, 7)
    assert census.reserve(b, 50)
    census.finish_count(mark, {a: 4, b: 700, c: 1})
    assert census.by_tenant(b"model") == {b"a": 4, b"b": 757, b"c": 1}
    assert census.reserve(a, 6)
    assert not census.reserve(a, 1)
    census.stored(a, 6)
    census.forget(tenant=b"a")
    assert b"a" not in census.by_tenant(b"model")


def test_a_census_tells_models_apart_and_a_quota_does_not() -> None:
    small, large = Holding(b"small", b"a"), Holding(b"large", b"a")
    census = Census()
    census.set_quotas({b"a": 10})
    assert census.reserve(small, 4)
    census.stored(small, 4)
    census.finish_count(Counter(), {large: 3})
    assert (census.by_tenant(b"small"), census.by_tenant(b"large")) == ({b"a": 4}, {b"a": 3})
    assert not census.reserve(small, 4)
    census.forget(identity=b"large")
    assert (census.by_tenant(b"small"), census.by_tenant(b"large")) == ({b"a": 4}, {})
    assert census.reserve(small, 6)


def test_key_count_goes_by_identity_and_ignores_other_keys() -> None:
    small, large = envelope(), envelope(identity=b"z" * 32, payload_bytes=5_000)
    count = KeyCount()
    count.add(small.key_of(key) for key in block_keys(3))
    count.add(large.key_of(replace(key, owner=BETA)) for key in block_keys(2))
    count.add([b"forebay:kv:broken", b"something:else"])
    sizes = {identity: 10 if b"69" in identity else 100 for identity in count.samples}
    assert len(sizes) == 2
    assert count.bytes_by_holding(sizes) == {
        Holding(small.identity_name, ACME.tenant): 30,
        Holding(large.identity_name, BETA.tenant): 200,
    }
