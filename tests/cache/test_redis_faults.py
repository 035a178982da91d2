"""The Redis tier when Redis or what it holds is not as it should be: a miss and a counter, at most
one timeout, and recovery without a restart."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.block import Owner
from cache.envelope import Envelope
from cache.redis_store import RedisStore
from cache.report import Miss
from tests.cache.redis_blocks import (
    PAYLOAD_BYTES,
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
from tests.cache.relay import relaying
from tests.cache.valkey import Valkey, running_valkey

UNTOUCHED = b"\xaa" * PAYLOAD_BYTES


@pytest.fixture(scope="module")
def sound_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """One that the tests of bad values share."""
    with running_valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
def sound_store(sound_server: Valkey) -> Iterator[RedisStore]:
    with running_store(sound_server.url) as store:
        yield store


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as server:
        yield server


def spoiled(
    store: RedisStore, server: Valkey, spoil: Callable[[bytes], bytes], shape: Envelope
) -> Miss | None:
    """Store three blocks, change the middle one's value, fetch: its outcome. The others load, and
    the bad value goes."""
    tier = store.tier(shape)
    keys, slots, into = block_keys(3), filled_slots(shape, 3), buffers(shape, 3)
    assert save(tier, keys, slots) == (True, True, True)
    with server.client() as client:
        name = shape.key_of(keys[1])
        good = client.get(name)
        assert isinstance(good, bytes)
        client.set(name, spoil(good), ex=100)
        first, outcome, last = fetch(tier, keys, into).outcomes
        assert (first, last) == (None, None)
        assert bytes(into[1]) == UNTOUCHED
        until(lambda: not client.exists(name))
    assert outcome is not None
    assert tier.stats().misses == {outcome: 1}
    return outcome


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_flipped_bits(data: st.DataObject, sound_server: Valkey, sound_store: RedisStore) -> None:
    shape = envelope()
    # Half of the examples in the header, which is small.
    last = data.draw(st.sampled_from([shape.header_bytes, shape.value_bytes])) - 1
    position = data.draw(st.integers(0, last))

    def flip(value: bytes) -> bytes:
        changed = bytearray(value)
        changed[position] ^= 1 << data.draw(st.integers(0, 7))
        return bytes(changed)

    assert spoiled(sound_store, sound_server, flip, shape) in (Miss.CORRUPT, Miss.FOREIGN)


@pytest.mark.parametrize("kept", [0, 1, 100, 255, 256, PAYLOAD_BYTES])
def test_truncated(kept: int, sound_server: Valkey, sound_store: RedisStore) -> None:
    outcome = spoiled(sound_store, sound_server, lambda value: value[:kept], envelope())
    assert outcome is Miss.CORRUPT


def test_swapped(sound_server: Valkey, sound_store: RedisStore) -> None:
    shape = envelope()
    tier = sound_store.tier(shape)
    keys, slots, into = block_keys(2, seed=5), filled_slots(shape, 2), buffers(shape, 2)
    save(tier, keys, slots)
    with sound_server.client() as client:
        names = [shape.key_of(key) for key in keys]
        first, second = client.mget(names)
        client.mset({names[0]: second, names[1]: first})
        assert fetch(tier, keys, into).outcomes == (Miss.FOREIGN, Miss.FOREIGN)
        assert [bytes(buffer) for buffer in into] == [UNTOUCHED, UNTOUCHED]
        until(lambda: client.exists(*names) == 0)


@pytest.mark.parametrize("size", [PAYLOAD_BYTES, PAYLOAD_BYTES * 2])
def test_written_by_another_model(size: int, sound_server: Valkey, sound_store: RedisStore) -> None:
    other = envelope(identity=b"o" * 32, payload_bytes=size)
    slot = filled_slots(other, 1)[0]
    other.write_header(block_keys(3)[1], slot)
    outcome = spoiled(sound_store, sound_server, lambda _: bytes(slot), envelope())
    assert outcome is Miss.FOREIGN


def test_of_another_type(sound_server: Valkey, sound_store: RedisStore) -> None:
    shape = envelope()
    tier = sound_store.tier(shape)
    keys = block_keys(1, seed=6)
    with sound_server.client() as client:
        client.lpush(shape.key_of(keys[0]), b"x")
        assert fetch(tier, keys, buffers(shape, 1)).outcomes == (Miss.FOREIGN,)
        until(lambda: not client.exists(shape.key_of(keys[0])))
    assert sound_store.up


def test_middle_blocks_evicted(sound_server: Valkey, sound_store: RedisStore) -> None:
    shape = envelope()
    tier = sound_store.tier(shape)
    keys = block_keys(200, seed=7)
    save(tier, keys, filled_slots(shape, 200))
    with sound_server.client() as client:
        client.delete(shape.key_of(keys[70]))
    outcomes = fetch(tier, keys, buffers(shape, 200)).outcomes
    assert outcomes == (*[None] * 70, Miss.EVICTED, *[None] * 129)


def test_absent_server_costs_nothing(tmp_path: Path) -> None:
    with running_store(f"unix://{tmp_path}/none.sock") as store:
        assert store.check_secret(1.0) is None
        tier = store.tier(envelope(store))
        keys = block_keys(3)
        started_s = time.monotonic()
        for _ in range(100):
            assert probe(tier, keys).failed is Miss.TIER_DOWN
            assert fetch(tier, keys, buffers(tier.envelope, 3)).outcomes == (Miss.TIER_DOWN,) * 3
            assert save(tier, keys, filled_slots(tier.envelope, 3)) is None
        assert time.monotonic() - started_s < 2.0
        counters = tier.stats()
        assert counters.misses == {Miss.TIER_DOWN: 300}
        assert counters.dropped == {"error": 300}
        assert not counters.up
        with pytest.raises(Exception, match="Redis did not answer"):
            tier.erase(b"acme____").result(1)


def test_appears_later(tmp_path: Path) -> None:
    server = Valkey(tmp_path)
    with running_store(server.url) as store:
        assert not store.up
        server.start()
        try:
            until(lambda: store.up)
            assert store.check_secret(1.0) is True
        finally:
            server.kill()


def test_stopped_and_restarted_empty(server: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forebay.cache")
    with running_store(server.url) as store:
        shape = envelope(store)
        tier = store.tier(shape)
        keys, slots = block_keys(3), filled_slots(shape, 3)
        save(tier, keys, slots)
        assert tier.server_lives == 1
        server.kill()
        failures = 0
        while store.up:
            assert probe(tier, keys).failed is Miss.TIER_DOWN
            failures += 1
        assert failures <= 3
        server.start()
        until(lambda: store.up)
        assert probe(tier, keys).present == (False,) * 3
        assert save(tier, keys, slots) == (True,) * 3
        assert store.check_secret(1.0) is True
        assert tier.stats().times_opened == 1
        assert tier.server_lives == 2
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    assert "answers again" in caplog.text


def test_a_restart_that_nobody_noticed_shows_at_the_next_count(server: Valkey) -> None:
    with running_store(server.url) as store:
        tier = store.tier(envelope(store))
        keys = block_keys(1, Owner(b"acme____", b"ann_____"))
        save(tier, keys, filled_slots(tier.envelope, 1))
        server.kill()
        server.start()
        save(tier, keys, filled_slots(tier.envelope, 1))
        assert tier.stats().times_opened == 0
        assert tier.erase(*keys[0].owner).result(5) == 1  # which makes it count anew
        until(lambda: tier.server_lives == 2)


def test_frozen_costs_one_timeout_once(server: Valkey) -> None:
    timeout_s = 0.2
    with running_store(server.url, timeout_s=timeout_s) as store:
        shape = envelope(store)
        tier = store.tier(shape)
        keys, slots, into = block_keys(3), filled_slots(shape, 3), buffers(shape, 3)
        save(tier, keys, slots)
        server.freeze()
        try:
            started_s = time.monotonic()
            assert probe(tier, keys).failed is Miss.LATE
            first_s = time.monotonic() - started_s
            assert timeout_s * 0.9 <= first_s < timeout_s + 0.5
            started_s = time.monotonic()
            for _ in range(50):
                assert probe(tier, keys).failed is Miss.TIER_DOWN
            assert time.monotonic() - started_s < 0.5
        finally:
            server.thaw()
        until(lambda: store.up)
        assert fetch(tier, keys, into).outcomes == (None,) * 3
        assert tier.server_lives == 1, "it is the server that it was"


def test_frozen_under_a_load_costs_a_timeout_not_the_deadline(server: Valkey) -> None:
    with running_store(server.url, timeout_s=0.2) as store:
        shape = envelope(store)
        tier = store.tier(shape)
        keys, slots, into = block_keys(3), filled_slots(shape, 3), buffers(shape, 3)
        save(tier, keys, slots)
        server.freeze()
        try:
            started_s = time.monotonic()
            outcomes = fetch(tier, keys, into, deadline_s=30.0).outcomes
            assert time.monotonic() - started_s < 2.0
            assert outcomes == (Miss.TIER_DOWN,) * 3
            assert not store.up
        finally:
            server.thaw()


def test_late_values_are_never_written(server: Valkey) -> None:
    with running_store(server.url) as store:
        shape = envelope(store, payload_bytes=1 << 20)
        tier = store.tier(shape)
        keys, slots, into = block_keys(6), filled_slots(shape, 6), buffers(shape, 6)
        save(tier, keys, slots)
        server.freeze()
        try:
            fetched = fetch(tier, keys, into, deadline_s=0.1)
        finally:
            server.thaw()
        assert fetched.outcomes == (Miss.LATE,) * 6
        assert 0.09 <= fetched.seconds < 1.0
        assert store.up, "a short deadline says nothing about Redis"
        assert probe(tier, keys).present == (True,) * 6
        time.sleep(0.1)
        assert all(bytes(buffer) == b"\xaa" * (1 << 20) for buffer in into)
        assert fetch(tier, keys, into).outcomes == (None,) * 6


def test_what_came_before_the_deadline_counts(server: Valkey) -> None:
    with relaying(server.socket_path) as relay, running_store(relay.url) as store:
        shape = envelope(store, payload_bytes=2 << 20)
        tier = store.tier(shape)
        keys, slots, into = block_keys(8), filled_slots(shape, 8), buffers(shape, 8)
        save(tier, keys, slots)
        relay.delay_s = 0.005  # for every 128 KiB at most, so 0.6 s for all
        outcomes = fetch(tier, keys, into, deadline_s=0.35).outcomes
        relay.delay_s = 0.0
        loaded = outcomes.count(None)
        assert 0 < loaded < 8
        assert outcomes == (*[None] * loaded, *[Miss.LATE] * (8 - loaded))
        assert [bytes(buffer) for buffer in into[:loaded]] == payloads(shape, slots)[:loaded]
        assert all(bytes(buffer) == b"\xaa" * (2 << 20) for buffer in into[loaded:])


def test_slowed_by_two_seconds_is_down_until_it_is_fast_again(server: Valkey) -> None:
    with relaying(server.socket_path) as relay, running_store(relay.url, timeout_s=0.2) as store:
        tier = store.tier(envelope(store))
        relay.delay_s = 2.0
        started_s = time.monotonic()
        assert probe(tier, block_keys(1)).failed is Miss.LATE
        assert time.monotonic() - started_s < 0.7
        for _ in range(10):
            assert probe(tier, block_keys(1)).failed is Miss.TIER_DOWN
        time.sleep(0.8)  # a probe is under way, and must not be taken in
        assert not store.up
        relay.delay_s = 0.0
        until(lambda: store.up)
        assert probe(tier, block_keys(1)).present == (False,)


def test_wrong_password(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_valkey(tmp_path, {"requirepass": "right"}) as server:
        with running_store(f"unix://:hunter2@{server.socket_path}") as store:
            assert not store.up
            time.sleep(0.8)
            assert probe(store.tier(envelope()), block_keys(1)).failed is Miss.TIER_DOWN
        with running_store(f"unix://:right@{server.socket_path}") as store:
            assert store.up
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "user or password refused" in warnings[0]
    assert "hunter2" not in caplog.text


def test_idle_connections_that_the_server_closed_are_replaced(server: Valkey) -> None:
    with running_store(server.url) as store, server.client() as client:
        shape = envelope(store)
        tier = store.tier(shape)
        keys, slots, into = block_keys(3), filled_slots(shape, 3), buffers(shape, 3)
        for _ in range(3):
            assert save(tier, keys, slots) == (True,) * 3
            assert probe(tier, keys).present == (True,) * 3
            assert fetch(tier, keys, into).outcomes == (None,) * 3
            client.client_kill_filter(_type="normal", skipme=True)
            time.sleep(0.05)
        assert tier.stats().times_opened == 0


def test_password_changed_under_way(server: Valkey) -> None:
    with running_store(server.url) as store:
        tier = store.tier(envelope(store))
        with server.client() as client:
            client.config_set("requirepass", "changed")
            client.client_kill_filter(_type="normal", skipme=True)
        while store.up:
            assert probe(tier, block_keys(1)).failed is Miss.TIER_DOWN


@pytest.mark.parametrize("options", [{"maxmemory": "3mb", "maxmemory-policy": "noeviction"}])
def test_out_of_memory_is_refused_not_down(tmp_path: Path, options: dict[str, str]) -> None:
    with running_valkey(tmp_path, options) as server, running_store(server.url) as store:
        shape = envelope(store, payload_bytes=1 << 20)
        tier = store.tier(shape)
        fates = save(tier, block_keys(8), filled_slots(shape, 8))
        assert fates is not None
        refused = fates.count(False)
        assert 0 < refused <= 8
        assert tier.stats().dropped == {"refused": refused}
        assert tier.stats().stores == 8 - refused
        assert store.up
        assert probe(tier, block_keys(8)).present == fates


def test_read_only_replica_is_refused_not_down(server: Valkey) -> None:
    with running_store(server.url) as store, server.client() as client:
        shape = envelope(store)
        tier = store.tier(shape)
        save(tier, block_keys(1), filled_slots(shape, 1))
        client.config_set("replica-serve-stale-data", "yes")
        client.replicaof("127.0.0.1", 1)
        assert save(tier, block_keys(2, seed=1), filled_slots(shape, 2)) == (False, False)
        assert tier.stats().dropped == {"refused": 2}
        assert store.up
        assert fetch(tier, block_keys(1), buffers(shape, 1)).outcomes == (None,)


def test_a_name_that_leads_to_another_server_is_followed(
    server: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was failed over from answers on kept connections, and takes no writes."""
    monkeypatch.setattr("cache.redis_writer._REFUSED_PAUSE_S", 0.0)
    other_directory = tmp_path / "other"
    other_directory.mkdir()
    with (
        running_valkey(other_directory) as other,
        relaying(server.socket_path) as name,
        running_store(name.url) as store,
        server.client() as client,
    ):
        shape = envelope(store)
        tier = store.tier(shape)
        assert save(tier, block_keys(1), filled_slots(shape, 1)) == (True,)
        name.target = other.socket_path
        client.replicaof("127.0.0.1", 1)
        assert save(tier, block_keys(1, seed=1), filled_slots(shape, 1)) == (False,)
        assert save(tier, block_keys(1, seed=2), filled_slots(shape, 1)) == (True,)
        with other.client() as client_of_other:
            assert client_of_other.exists(shape.key_of(block_keys(1, seed=2)[0]))


def test_writer_killed_mid_store_leaves_no_half_block(server: Valkey) -> None:
    """A SET that is not whole is never executed: sent by hand, cut, and the connection dropped."""
    import socket

    shape = envelope()
    key = block_keys(1)[0]
    slot = filled_slots(shape, 1)[0]
    shape.write_header(key, slot)
    name = shape.key_of(key)
    with socket.socket(socket.AF_UNIX) as writer:
        writer.connect(str(server.socket_path))
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, len(slot))
        writer.sendall(head + bytes(slot[: len(slot) // 2]))
    with running_store(server.url) as store:
        assert probe(store.tier(shape), [key]).present == (False,)


def redis_threads() -> int:
    return [thread.name for thread in threading.enumerate()].count("forebay-redis")


def test_close_while_busy_answers_everything_once(server: Valkey) -> None:
    before = redis_threads()
    with running_store(server.url) as store:
        shape = envelope(store, payload_bytes=1 << 20)
        tier = store.tier(shape)
        keys, slots = block_keys(16), filled_slots(shape, 16)
        assert save(tier, keys, slots) == (True,) * 16
        server.freeze()
        try:
            probes, fetches, stores = ([Once() for _ in range(8)] for _ in range(3))
            into = [buffers(shape, 16) for _ in range(8)]
            for index in range(8):
                tier.probe(keys, probes[index])
                tier.fetch(list(zip(keys, into[index], strict=True)), 30.0, fetches[index])
                assert tier.store(list(zip(keys, slots, strict=True)), stores[index])
            erasure = tier.erase(keys[0].owner.tenant)
            started_s = time.monotonic()
            store.close(5.0)
            assert time.monotonic() - started_s < 2.0
        finally:
            server.thaw()
        assert all(done.wait(0.1).failed is Miss.TIER_DOWN for done in probes)
        assert all(done.wait(0.1).outcomes == (Miss.TIER_DOWN,) * 16 for done in fetches)
        assert all(done.wait(0.1) == (False,) * 16 for done in stores)
        assert {len(done.calls) for done in (*probes, *fetches, *stores)} == {1}
        with pytest.raises(Exception, match="Redis did not answer"):
            erasure.result(0)
        assert redis_threads() == before


def test_a_failing_callback_does_not_end_the_thread(
    server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("the asker's own fault")

    with running_store(server.url) as store:
        tier = store.tier(envelope(store))
        tier.probe(block_keys(1), fail)
        assert probe(tier, block_keys(1)).present == (False,)
    assert "the asker's own fault" in caplog.text


def test_traffic_during_outages_is_always_answered_once(server: Valkey) -> None:
    with running_store(server.url, timeout_s=0.3) as store:
        shape = envelope(store)
        tier = store.tier(shape)
        keys, slots = block_keys(12), filled_slots(shape, 12)
        stop = threading.Event()
        callbacks: list[Once] = []
        wrong: list[str] = []

        def traffic() -> None:
            while not stop.is_set():
                into = buffers(shape, 12)
                done = Once()
                callbacks.append(done)
                tier.fetch(list(zip(keys, into, strict=True)), 1.0, done)
                for outcome, buffer, slot in zip(done.wait().outcomes, into, slots, strict=True):
                    if outcome is None and buffer != slot[shape.header_bytes :]:
                        wrong.append("a loaded block differs")
                done = Once()
                if tier.store(list(zip(keys, slots, strict=True)), done):
                    callbacks.append(done)
                    done.wait()

        worker = threading.Thread(target=traffic)
        worker.start()
        try:
            for _ in range(2):
                time.sleep(0.1)
                server.kill()
                until(lambda: not store.up)
                server.start()
                until(lambda: store.up)
        finally:
            stop.set()
            worker.join()
    assert wrong == []
    assert {len(done.calls) for done in callbacks} == {1}
