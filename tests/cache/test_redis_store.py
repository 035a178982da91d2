"""The Redis tier against a real server that works."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cache.envelope import Envelope
from cache.redis_connection import TcpConnection
from cache.redis_server import SECRET_CHECK_KEY
from cache.redis_store import RedisOptions, RedisStore
from cache.report import Miss
from tests.cache.redis_blocks import (
    PAYLOAD_BYTES,
    SECRET,
    Once,
    block_keys,
    buffers,
    envelope,
    fetch,
    filled_slots,
    payloads,
    probe,
    running_store,
    save,
    until,
)
from tests.cache.tls_proxy import tls_proxy
from tests.cache.valkey import Valkey, free_port, running_valkey


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running_valkey(tmp_path_factory.mktemp("valkey"), tcp=True) as server:
        yield server


@pytest.fixture
def server(shared_server: Valkey) -> Valkey:
    with shared_server.client() as client:
        client.flushall()
    return shared_server


def round_trip(store: RedisStore, count: int = 9, payload_bytes: int = PAYLOAD_BYTES) -> None:
    shape = envelope(store, payload_bytes=payload_bytes)
    tier = store.tier(shape)
    keys, slots, into = block_keys(count), filled_slots(shape, count), buffers(shape, count)
    before = payloads(shape, slots)
    assert probe(tier, keys).present == (False,) * count
    assert save(tier, keys, slots) == (True,) * count
    assert payloads(shape, slots) == before
    assert probe(tier, keys).present == (True,) * count
    fetched = fetch(tier, keys, into)
    assert fetched.outcomes == (None,) * count
    assert fetched.seconds > 0
    assert [bytes(buffer) for buffer in into] == before
    counters = tier.stats()
    assert (counters.hits, counters.stores, counters.misses) == (count, count, {})
    assert counters.up
    assert counters.server_version.startswith("valkey ")


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("payload_bytes", [1_000, 369_000, 3 << 20])
def test_round_trip_over_a_unix_socket(server: Valkey, encrypt: bool, payload_bytes: int) -> None:
    with running_store(f"unix://{server.socket_path}", encrypt=encrypt) as store:
        round_trip(store, 9, payload_bytes)


def test_round_trip_over_tcp(server: Valkey) -> None:
    with running_store(server.url) as store:
        round_trip(store)


def test_another_process_and_a_later_one_find_the_blocks(server: Valkey) -> None:
    shape = envelope()
    keys, slots, into = block_keys(3), filled_slots(shape, 3), buffers(shape, 3)
    with running_store(server.url) as store:
        save(store.tier(shape), keys, slots)
    with running_store(server.url) as store:
        assert fetch(store.tier(envelope()), keys, into).outcomes == (None,) * 3
    assert [bytes(buffer) for buffer in into] == payloads(shape, slots)


def test_other_owner_or_identity_finds_nothing(server: Valkey) -> None:
    with running_store(server.url) as store:
        shape = envelope(store)
        keys = block_keys(2)
        save(store.tier(shape), keys, filled_slots(shape, 2))
        others = [replace(key, owner=key.owner._replace(tenant=b"other___")) for key in keys]
        assert probe(store.tier(shape), others).present == (False, False)
        other_model = store.tier(envelope(store, identity=b"j" * 32))
        assert probe(other_model, keys).present == (False, False)
        outcomes = fetch(other_model, keys, buffers(shape, 2)).outcomes
        assert outcomes == (Miss.EVICTED, Miss.EVICTED)


def test_blocks_expire(server: Valkey) -> None:
    with running_store(server.url, ttl_s=100) as store, server.client() as client:
        shape = envelope(store)
        tier = store.tier(shape)
        keys, slots = block_keys(2), filled_slots(shape, 2)
        save(tier, keys[:1], slots[:1])
        done = Once()
        assert tier.store([(keys[1], slots[1])], done, ttl_s=5000)
        done.wait()
        assert 90 < client.ttl(shape.key_of(keys[0])) <= 100
        assert 4900 < client.ttl(shape.key_of(keys[1])) <= 5000


def test_storing_again_never_shortens_a_life(server: Valkey) -> None:
    with running_store(server.url, ttl_s=100) as store, server.client() as client:
        shape = envelope(store)
        tier = store.tier(shape)
        keys, slots = block_keys(4), filled_slots(shape, 4)
        names = [shape.key_of(key) for key in keys]
        done = Once()
        assert tier.store(list(zip(keys[:1], slots[:1], strict=True)), done, ttl_s=5000)
        assert done.wait() == (True,)
        client.set(names[1], b"of another size", ex=9000)
        client.lpush(names[2], b"of another type")
        assert save(tier, keys, slots) == (True,) * 4
        lives = [client.ttl(name) for name in names]
        assert 4900 < lives[0] <= 5000
        assert all(90 < life <= 100 for life in lives[1:])
        assert fetch(tier, keys, buffers(shape, 4)).outcomes == (None,) * 4
        again, counted = Once(), tier.stats().census_bytes
        assert tier.store(list(zip(keys, slots, strict=True)), again, ttl_s=7000)
        assert again.wait() == (True,) * 4
        assert all(6900 < client.ttl(name) <= 7000 for name in names)
        assert tier.stats().census_bytes == counted, "what was there is counted once more"


def test_sealed_blocks_show_neither_text_nor_payload(server: Valkey) -> None:
    with running_store(server.url, encrypt=True) as store, server.client() as client:
        shape = envelope(store)
        keys, slots = block_keys(1), filled_slots(shape, 1)
        save(store.tier(shape), keys, slots)
        value = client.get(shape.key_of(keys[0]))
        assert isinstance(value, bytes)
        assert keys[0].token_bytes not in value
        assert payloads(shape, slots)[0][:16] not in value


def test_values_of_another_size_are_not_there_and_go(server: Valkey) -> None:
    with running_store(server.url) as store, server.client() as client:
        shape = envelope(store)
        keys = block_keys(3)
        client.set(shape.key_of(keys[0]), b"x" * 100_000)
        client.lpush(shape.key_of(keys[1]), b"x")
        found = probe(store.tier(shape), keys)
        assert found.present == (False, False, False)
        assert found.damaged == {0, 1}
        until(lambda: not client.exists(*map(shape.key_of, keys)))


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "sealed"])
def test_blocks_of_the_other_encryption_are_foreign_and_go(server: Valkey, encrypt: bool) -> None:
    keys = block_keys(2)
    with running_store(server.url, encrypt=not encrypt) as store:
        other = envelope(store)
        save(store.tier(other), keys, filled_slots(other, 2))
    with running_store(server.url, encrypt=encrypt) as store, server.client() as client:
        shape = envelope(store)
        client.set(shape.key_of(keys[1]), b"cut short")
        found = probe(store.tier(shape), keys)
        assert (found.present, found.damaged, found.foreign) == ((False, False), {1}, {0})
        until(lambda: not client.exists(*map(shape.key_of, keys)))


def test_size_guard(server: Valkey) -> None:
    with running_store(server.url, max_value_bytes=PAYLOAD_BYTES) as store:
        shape = envelope(store)
        tier = store.tier(shape)
        assert save(tier, block_keys(2), filled_slots(shape, 2)) is None
        assert tier.stats().dropped == {"too_big": 2}


def test_a_full_queue_refuses_at_once(server: Valkey) -> None:
    with running_store(server.url, queue_bytes=3 * PAYLOAD_BYTES) as store:
        shape = envelope(store)
        tier = store.tier(shape)
        assert save(tier, block_keys(4), filled_slots(shape, 4)) is None
        assert tier.stats().dropped == {"busy": 4}
        for _ in range(3):
            assert save(tier, block_keys(2), filled_slots(shape, 2)) == (True, True)


def test_parts_are_told_as_they_come(server: Valkey) -> None:
    with running_store(server.url) as store:
        shape = envelope(store, payload_bytes=1 << 20)
        tier = store.tier(shape)
        keys, slots, into = block_keys(5), filled_slots(shape, 5), buffers(shape, 5)
        save(tier, keys, slots)
        with server.client() as client:
            client.delete(shape.key_of(keys[3]))
        done, parts = Once(), Once()
        tier.fetch(list(zip(keys, into, strict=True)), 5.0, done, parts)
        assert done.wait().outcomes == (None, None, None, Miss.EVICTED, None)
        assert parts.calls == [1, 2, 3]
        assert set(done.threads + parts.threads) == {"forebay-redis"}


def test_nothing_to_ask_is_answered(server: Valkey) -> None:
    with running_store(server.url) as store:
        tier = store.tier(envelope(store))
        assert probe(tier, []).present == ()
        assert fetch(tier, [], []).outcomes == ()


def test_the_same_secret_agrees_and_another_is_told(
    server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    with running_store(server.url) as store:
        assert store.check_secret(5.0) is True
    with running_store(server.url) as store:
        assert store.check_secret(5.0) is True
    assert "secret" not in caplog.text
    with running_store(server.url, secret=b"quite another") as store:
        assert store.check_secret(5.0) is False
    assert "under another server secret" in caplog.text
    assert "quite another" not in caplog.text
    with server.client() as client:
        stored = client.get(SECRET_CHECK_KEY)
        assert isinstance(stored, bytes)
        assert SECRET not in stored


def test_tls(tmp_path: Path, server: Valkey) -> None:
    with tls_proxy(tmp_path, server.socket_path) as (proxy, authority):
        url = f"rediss://127.0.0.1:{proxy.port}"
        with running_store(url, tls_ca=str(authority)) as store:
            round_trip(store, payload_bytes=369_000)
        with running_store(url) as store:
            assert not store.up, "a certificate that nobody vouches for must not do"


def test_cluster(tmp_path: Path) -> None:
    options = {"cluster-enabled": "yes", "cluster-port": str(free_port())}
    with running_valkey(tmp_path, options, tcp=True) as server:
        with server.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            until(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        with running_store(server.url) as store:
            assert store.facts.cluster
            round_trip(store, 20)
            nodes = store._link._client.get_nodes()  # type: ignore[union-attr]
            assert {node.connection_class for node in nodes} == {TcpConnection}
            assert store.tier(envelope(store)).erase(block_keys(1)[0].owner.tenant).result(5) == 20


@pytest.mark.parametrize(
    ("policy", "warned"), [("allkeys-lru", True), ("noeviction", True), ("volatile-lru", False)]
)
def test_policies_that_endanger_others_are_warned_of(
    tmp_path: Path, policy: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    settings = {"maxmemory-policy": policy}
    with running_valkey(tmp_path, settings) as server, running_store(server.url) as store:
        assert store.facts.maxmemory_policy == policy
    assert (policy in caplog.text) == warned
    assert len(caplog.records) == warned


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"url": "http://user:hunter2@host"}, "url"),
        ({"secret": b""}, "secret"),
        ({"url": "unix:///x", "cluster": True}, "cluster"),
        ({"max_connections": 2}, "max_connections"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"queue_bytes": 0}, "queue_bytes"),
        ({"tls_ca": "/nowhere/ca.pem"}, "tls_ca"),
    ],
)
def test_bad_options_are_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}|and {named}") as caught:
        RedisOptions(**{"url": "redis://localhost", "secret": SECRET, **change})  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)


def test_unknown_url_parameters_are_refused() -> None:
    options = RedisOptions(url="redis://:hunter2@localhost?tiemout=1", secret=SECRET)
    with pytest.raises(ValueError, match="url: has a parameter that is not known"):
        RedisStore(options)


def test_buffers_of_another_size_are_refused(server: Valkey) -> None:
    with running_store(server.url) as store:
        shape = envelope(store)
        tier = store.tier(shape)
        done = Once()
        with pytest.raises(ValueError, match="slot: 10 bytes"):
            tier.store([(block_keys(1)[0], memoryview(bytearray(10)))], done)
        with pytest.raises(ValueError, match="buffer: 10 bytes"):
            tier.fetch([(block_keys(1)[0], memoryview(bytearray(10)))], 1.0, done)
        assert done.calls == []


def test_one_bad_job_does_not_end_the_writer(
    server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    with running_store(server.url) as store:
        shape = envelope(store)
        tier = store.tier(shape)
        slots = filled_slots(shape, 1)
        short = replace(block_keys(1)[0], token_bytes=b"")
        assert save(tier, [short], slots) == (False,)
        assert save(tier, block_keys(1), slots) == (True,)
    assert "a block of 0 tokens" in caplog.text


def test_very_many_keys_are_probed(server: Valkey) -> None:
    with running_store(server.url) as store:
        shape = envelope(store)
        tier = store.tier(shape)
        keys = block_keys(3000)
        save(tier, keys[2998:], filled_slots(shape, 2))
        assert probe(tier, keys).present == (*[False] * 2998, True, True)


def test_no_password_in_what_is_shown() -> None:
    options = RedisOptions(url="rediss://user:hunter2@example:7000/2?timeout=1", secret=SECRET)
    assert options.location == "rediss://example:7000"
    assert "hunter2" not in repr(options)
    assert "secret" not in repr(options)


def test_a_store_starts_once_and_closes_often(server: Valkey) -> None:
    store = RedisStore(RedisOptions(url=server.url, secret=SECRET))
    store.start()
    with pytest.raises(RuntimeError):
        store.start()
    store.close()
    store.close()
    shape: Envelope = envelope()
    assert probe(store.tier(shape), block_keys(1)).failed is Miss.TIER_DOWN
