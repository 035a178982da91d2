"""Redis and what it holds go wrong while clients ask: no request fails or answers otherwise than
cold, waiting ends with one timeout, the metrics say what happened, and it heals by itself."""

from __future__ import annotations

import signal
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import xxhash

from cache.envelope import header_bytes
from tests.cache.relay import Relay, relaying
from tests.cache.valkey import running_valkey
from tests.e2e.gateway_process import eventually
from tests.e2e.redis_stage import PATIENCE_S, RedisStage, drops, misses, up

STORES = "forebay_cache_stores_total"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, wordy: Path) -> Iterator[RedisStage]:
    directory = tmp_path_factory.mktemp("faults")
    with running_valkey(directory) as valkey:
        stage = RedisStage(directory, valkey, wordy)
        try:
            yield stage
        finally:
            stage.close()


@contextmanager
def stopped(stage: RedisStage) -> Iterator[None]:
    stage.valkey.kill()
    yield
    stage.valkey.start()


@contextmanager
def frozen(stage: RedisStage) -> Iterator[None]:
    """Connections are accepted, and nothing is answered."""
    stage.valkey.freeze()
    try:
        yield
    finally:
        stage.valkey.thaw()


@contextmanager
def slowed(stage: RedisStage) -> Iterator[None]:
    """Every answer takes two seconds."""
    with through_relay(stage) as relay:
        stage.until_hits(5)
        relay.delay_s = 2.0
        yield
        relay.delay_s = 0.0
        stage.until_up()


@contextmanager
def through_relay(stage: RedisStage) -> Iterator[Relay]:
    """What the gateway says to Redis goes through a relay."""
    listen = stage.entrance.with_name("relay.sock")
    with relaying(stage.valkey.socket_path, listen=listen) as relay:
        stage.lead_to(listen)
        disconnect_all(stage)
        try:
            yield relay
        finally:
            stage.lead_to(stage.valkey.socket_path)
    listen.unlink(missing_ok=True)


def disconnect_all(stage: RedisStage) -> None:
    with stage.valkey.client() as connection:
        connection.client_kill_filter(_type="normal", skipme=True)


@contextmanager
def password_changed(stage: RedisStage) -> Iterator[None]:
    with stage.valkey.client() as connection:
        connection.config_set("requirepass", "another")
        connection.client_kill_filter(_type="normal", skipme=True)
        yield
        connection.config_set("requirepass", "")


@pytest.mark.parametrize("outage", [stopped, frozen, slowed, password_changed])
def test_outages(
    stage: RedisStage, outage: Callable[[RedisStage], AbstractContextManager[None]]
) -> None:
    with stage.traffic() as traffic:
        stage.until_hits()
        before = stage.metrics()
        began_s = time.monotonic()
        with outage(stage):
            stage.until(lambda metrics: not up(metrics))
            noticed_s = time.monotonic()
            traffic.go_on(4)
            assert not up(stage.metrics())
            healed_s = time.monotonic()
        after = stage.metrics()
        stage.until_up()
        stage.until_hits()
    assert misses(after, "tier_down") > misses(before, "tier_down")
    during = [answer for answer in traffic.since(began_s) if answer.answered_s < healed_s]
    assert max(answer.waited_s for answer in during) < stage.longest_wait_s
    without = [answer for answer in during if answer.asked_s > noticed_s]
    assert {(answer.waited_s, answer.from_redis) for answer in without} == {(0.0, 0)}


def restart_empty(stage: RedisStage) -> None:
    stage.valkey.kill()
    stage.valkey.start()


def flush_all(stage: RedisStage) -> None:
    with stage.valkey.client() as connection:
        connection.flushall()


@pytest.mark.parametrize("lose", [restart_empty, flush_all])
def test_everything_lost(stage: RedisStage, lose: Callable[[RedisStage], None]) -> None:
    with stage.traffic() as traffic:
        stage.until_hits()
        evicted = misses(stage.metrics(), "evicted")
        began_s = time.monotonic()
        lose(stage)
        stage.until(lambda metrics: misses(metrics, "evicted") > evicted)
        stage.until_hits()
        traffic.go_on(1)
    assert max(answer.waited_s for answer in traffic.since(began_s)) < stage.longest_wait_s


def test_blocks_in_the_middle_evicted(stage: RedisStage) -> None:
    with stage.traffic():
        stage.until_hits()
        before = stage.metrics()

        def gaps_were_met() -> bool:
            """Delete every third block, as an eviction might, until it was noticed."""
            with stage.valkey.client() as connection:
                connection.delete(*stage.blocks(connection)[::3])
            metrics = stage.metrics()
            return all(
                misses(metrics, reason) > misses(before, reason)
                for reason in ("evicted", "after_gap")
            )

        eventually(gaps_were_met, PATIENCE_S, every_s=0.2)
        stage.until_hits()


def test_out_of_memory(stage: RedisStage) -> None:
    with stage.traffic(), stage.valkey.client() as connection:
        stage.until_hits()
        connection.config_set("maxmemory-policy", "noeviction")
        connection.config_set("maxmemory", "1")
        names = stage.blocks(connection)
        connection.delete(*names[::2])  # or there is nothing to write
        refused = drops(stage.metrics(), "refused")
        stage.until(lambda metrics: drops(metrics, "refused") > refused)
        assert up(stage.metrics())
        connection.config_set("maxmemory", "512mb")
        connection.config_set("maxmemory-policy", "volatile-lru")
        stage.until_more(STORES, 5, tier="redis")
        stage.until_hits()


def flipped(value: bytes, _: bytes) -> bytes:
    """By one bit, of a number's exponent: used, it would show."""
    changed = bytearray(value)
    changed[len(value) // 2 | 3] ^= 0x40
    return bytes(changed)


def truncated(value: bytes, _: bytes) -> bytes:
    return value[: len(value) // 2]


def swapped(_: bytes, another: bytes) -> bytes:
    return another


def of_another_model(value: bytes, _: bytes) -> bytes:
    """Whole and sound, of another cache identity; see `cache.envelope` for the layout."""
    return with_checksum(value[:8] + bytes(32) + value[40:])


def of_another_block_size(value: bytes, _: bytes) -> bytes:
    """Whole and sound, and as long as ours, but of more tokens."""
    payload_bytes = struct.pack("<Q", len(value) - header_bytes(64))
    shape = struct.pack("<I", 64) + value[100:120] + payload_bytes
    return with_checksum(value[:96] + shape + value[128:])


def with_checksum(value: bytes) -> bytes:
    digest = xxhash.xxh3_128_digest(value[:128] + bytes(16) + value[144:])
    return value[:128] + digest + value[144:]


CHANGES = (flipped, truncated, swapped, of_another_model, of_another_block_size)
BAD_TTL_S = 1000


def spoil(connection: redis.Redis, names: list[bytes]) -> dict[str, list[bytes]]:
    """Change every block in Redis, each in one of five ways; which in which way."""
    values: Any = connection.mget(names)
    spoiled = defaultdict(list)
    for index, (name, value, another) in enumerate(
        zip(names, values, [*values[1:], values[0]], strict=True)
    ):
        change = CHANGES[index % len(CHANGES)]
        if value is None or another is None:
            continue
        if connection.set(name, change(value, another), ex=BAD_TTL_S, xx=True):
            spoiled[change.__name__].append(name)
    return spoiled


def test_values_that_are_not_the_block(stage: RedisStage) -> None:
    with stage.traffic(), stage.valkey.client() as connection:
        stage.until_hits()
        before = stage.metrics()
        spoiled = spoil(connection, stage.blocks(connection))
        assert set(spoiled) == {change.__name__ for change in CHANGES}

        def some_of_each_are_gone() -> bool:
            """Deleted, or replaced by a good value, which lives longer."""
            return all(
                any(not 0 <= connection.ttl(name) <= BAD_TTL_S for name in names)
                for names in spoiled.values()
            )

        eventually(some_of_each_are_gone, PATIENCE_S, every_s=0.1)
        # those that a good value replaced first were met by nobody
        for reason in ("corrupt", "foreign"):
            stage.until(lambda metrics, r=reason: misses(metrics, r) > misses(before, r))
        assert up(stage.metrics())
        stage.until_hits()


def test_dram_full(stage: RedisStage) -> None:
    """It always is here, and half of its slots at most are landed on, fewer than a prompt needs."""
    with stage.traffic():
        stage.until_hits()
        before = misses(stage.metrics(), "no_room")
        stage.until_more("forebay_cache_evictions_total", 5, tier="dram")
        stage.until(lambda metrics: misses(metrics, "no_room") > before)
        stage.until_hits()


def test_writer_killed_in_the_middle_of_a_block(stage: RedisStage) -> None:
    """The next gateway starts while Redis is frozen, and later finds whole blocks only."""
    with through_relay(stage) as relay:
        flush_all(stage)  # there will be something to write
        try:
            with stage.traffic():
                stage.until_more(STORES, 20, tier="redis")
                relay.cut_bytes = 100_000
                assert relay.was_cut.wait(PATIENCE_S)
                stage.gateway.send(signal.SIGKILL)
                stage.gateway.exit_code()
        except httpx.TransportError:
            assert not stage.runs  # its clients saw it go
    with frozen(stage):
        assert not up(stage.metrics())
        with stage.traffic() as traffic:
            traffic.go_on(4)
        assert {answer.from_redis for answer in traffic.answers} == {0}
    with stage.traffic():
        stage.until_up()
        stage.until_hits()
    metrics = stage.metrics()
    assert misses(metrics, "corrupt") == misses(metrics, "foreign") == 0


def test_ending_while_redis_is_frozen(stage: RedisStage) -> None:
    with stage.traffic() as traffic:
        stage.until_hits(5)
    assert traffic.answers
    with frozen(stage):
        stage.gateway.send(signal.SIGTERM)
        assert stage.gateway.exit_code() == 0
