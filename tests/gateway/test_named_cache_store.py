"""Named prefixes in Redis: shared, sealed, lasting, and doing without when it is gone."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs

from gateway.errors import ApiError
from gateway.named_cache_store import RedisNamedCacheStore, open_control_client
from gateway.named_caches import Allowance, NamedCaches
from tests.cache.relay import relaying
from tests.cache.tls_proxy import make_certificate
from tests.cache.valkey import Valkey, running_valkey
from tests.gateway.test_named_caches import Clock, entry, make

SECRET = b"server secret"


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as server:
        yield server


@asynccontextmanager
async def gateway(
    server: Valkey,
    *,
    secret: bytes = SECRET,
    clock: Clock | None = None,
    timeout_s: float = 1.0,
    url: str | None = None,
) -> AsyncIterator[NamedCaches]:
    """One gateway's registry on a server, by another way if `url` says so."""
    client = open_control_client(url or server.url, timeout_s=2.0)
    store = RedisNamedCacheStore(client, secret, timeout_s=timeout_s)
    try:
        yield NamedCaches(store, secret, clock=clock or Clock())
    finally:
        await store.close()
        await client.aclose()


async def test_names_outlive_a_gateway_and_are_shared_by_two(valkey: Valkey) -> None:
    async with gateway(valkey) as first:
        owner = first.owner("acme", None)
        cache = entry(owner, text="a prompt: ü")
        await make(first, cache)
    async with gateway(valkey) as second, gateway(valkey) as third:
        assert await second.find(owner, "handbook") == cache
        assert await third.live(owner) == [cache]
        assert await second.delete(owner, "handbook")
        assert await third.find(owner, "handbook") is None
        assert await third.live(owner) == []


async def test_what_redis_holds_tells_nothing_and_has_no_ttl(valkey: Valkey) -> None:
    async with gateway(valkey) as named:
        owner = named.owner("acme", "ann")
        await make(named, entry(owner, text="confidential words"))
    with valkey.client() as client:
        (key,) = client.keys("*")
        assert key == b"forebay:caches:" + owner.tenant.hex().encode()
        ((field, value),) = client.hgetall(key).items()
        assert field.endswith(b":handbook")
        assert b"confidential" not in value
        assert b"acme" not in key + field + value
        assert client.ttl(key) == -1  # a key with a ttl could be evicted in favour of KV


async def test_a_value_that_was_tampered_with_or_moved_is_ignored_and_said(
    valkey: Valkey,
) -> None:
    async with gateway(valkey) as named:
        owner = named.owner("acme", None)
        await make(named, entry(owner, "one"))
        await make(named, entry(owner, "two"))
    with valkey.client() as client:
        (key,) = client.keys("*")
        values = client.hgetall(key)
        one, two = sorted(values)
        broken = bytearray(values[one])
        broken[-1] ^= 1
        client.hset(key, mapping={one: bytes(broken), two: values[one]})
        client.hset(key, b"nonsense", b"")
    async with gateway(valkey) as named:
        with capture_logs() as logs:
            assert await named.find(owner, "one") is None
            assert await named.find(owner, "one") is None
        assert [line["log_level"] for line in logs] == ["warning"]
        assert "is ignored" in logs[0]["event"]
        assert await named.live(owner) == []
        await make(named, entry(owner, "one"))
    async with gateway(valkey) as named:
        assert [each.place.name for each in await named.live(owner)] == ["one"]


async def test_another_secret_reads_nothing(valkey: Valkey) -> None:
    async with gateway(valkey) as named:
        owner = named.owner("acme", None)
        await make(named, entry(owner))
    async with gateway(valkey, secret=b"another") as named:
        assert await named.find(owner, "handbook") is None
        assert await named.live(owner) == []


async def test_expired_names_and_forgotten_deletions_leave_redis(valkey: Valkey) -> None:
    clock = Clock()
    async with gateway(valkey, clock=clock) as named:
        owner = named.owner("acme", None)
        await make(named, entry(owner, "one"))
        await make(named, entry(owner, "two"))
        await named.delete(owner, "two")
        with valkey.client() as client:
            (key,) = client.keys("*")
            assert client.hlen(key) == 2
            clock.now_s += 60
            assert await named.live(owner) == []
            clock.now_s += 600  # by which others' clocks may be behind
            assert await named.live(owner) == []
            assert client.keys("*") == []


async def test_a_gateway_whose_clock_is_ahead_takes_nothing_from_the_others(
    valkey: Valkey,
) -> None:
    now, ahead = Clock(), Clock()
    ahead.now_s += 30
    async with gateway(valkey, clock=now) as one, gateway(valkey, clock=ahead) as other:
        owner = one.owner("acme", None)
        kept = entry(owner, "kept")
        await make(one, kept)
        await make(one, entry(owner, "deleted"))
        assert await other.delete(owner, "deleted")
        ahead.now_s += 30  # to it both have expired
        assert await other.live(owner) == []
        assert await one.live(owner) == [kept]  # and it does not bring the deleted one back
        async with gateway(valkey, clock=now) as later:
            assert await later.live(owner) == [kept]


async def test_redis_that_lost_everything_gets_it_back(valkey: Valkey) -> None:
    async with gateway(valkey) as named:
        owner = named.owner("acme", None)
        cache = entry(owner)
        await make(named, cache)
        with valkey.client() as client:
            client.flushall()
        assert await named.live(owner) == [cache]
        with valkey.client() as client:
            assert len(client.keys("*")) == 1


async def test_memory_answers_while_redis_is_down_and_is_written_when_it_is_back(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.named_cache_store._QUIET_S", 0.0)
    async with gateway(valkey) as named:
        acme, beta = named.owner("acme", None), named.owner("beta", None)
        await make(named, entry(acme))
        valkey.kill()
        with capture_logs() as logs:
            assert await named.find(acme, "handbook") is not None
            await make(named, entry(beta))
            assert await named.delete(acme, "handbook")
            assert await named.find(acme, "handbook") is None
            valkey.start()
            # whoever asks first brings every tenant up to date
            assert len(await named.live(beta)) == 1
        assert [line["log_level"] for line in logs] == ["warning", "info"]
        with valkey.client() as client:
            assert len(client.keys("*")) == 2
    async with gateway(valkey) as other:
        assert await other.find(acme, "handbook") is None
        assert await other.find(beta, "handbook") is not None


async def test_a_frozen_redis_costs_one_time_limit_and_then_nothing(valkey: Valkey) -> None:
    async with gateway(valkey, timeout_s=0.1) as named:
        owner = named.owner("acme", None)
        await make(named, entry(owner))
        valkey.freeze()
        try:
            began_s = time.monotonic()
            for _ in range(20):
                assert await named.find(owner, "handbook") is not None
            assert time.monotonic() - began_s < 0.5
        finally:
            valkey.thaw()


async def test_an_erasure_that_redis_has_not_heard_of_is_not_complete(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.named_cache_store._QUIET_S", 0.0)
    async with gateway(valkey, timeout_s=0.1) as named:
        owner = named.owner("acme", None)
        await make(named, entry(owner))
        valkey.freeze()
        try:
            assert await named.erase_tenant("acme", None) == (1, False)
        finally:
            valkey.thaw()
        assert await named.erase_tenant("acme", None) == (0, True)
    async with gateway(valkey) as later:
        assert await later.live(owner) == []


async def test_what_another_gateway_made_meanwhile_counts(valkey: Valkey) -> None:
    allowance = Allowance(quota_bytes=250, shared_bytes=0)
    async with gateway(valkey) as here, gateway(valkey) as there:
        owner = here.owner("acme", None)
        await there.load(owner, ["acme"])
        for name in ("one", "two"):
            await make(here, entry(owner, name, kv_bytes=100), allowance)
        await there.load(owner, ["acme"])
        with pytest.raises(ApiError, match="does not fit"):
            await make(there, entry(owner, "three", kv_bytes=100), allowance)


async def test_what_an_old_primary_refuses_goes_to_the_one_that_took_over(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.named_cache_store._QUIET_S", 0.0)
    new = tmp_path / "new"
    new.mkdir()
    with running_valkey(new) as successor, relaying(valkey.socket_path) as relay:
        async with gateway(valkey, url=relay.url) as named:
            owner = named.owner("acme", None)
            await make(named, entry(owner, "one"))
            relay.target = successor.socket_path  # of connections that are made from now on
            with valkey.client() as client:
                client.replicaof("127.0.0.1", 1)
            await make(named, entry(owner, "two"))
            assert len(await named.live(owner)) == 2
        async with gateway(successor) as other:
            assert [each.place.name for each in await other.live(owner)] == ["one", "two"]


async def test_a_server_so_far_away_that_connecting_takes_longer_than_a_question(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.named_cache_store._QUIET_S", 0.0)
    async with gateway(valkey) as near:
        owner = near.owner("acme", None)
        await make(near, entry(owner))
        with relaying(valkey.socket_path) as relay:
            relay.delay_s = 0.06  # and connecting takes several exchanges
            async with gateway(valkey, url=relay.url, timeout_s=0.1) as far:
                assert await far.find(owner, "handbook") is None
                async with asyncio.timeout(5):
                    while await far.find(owner, "handbook") is None:
                        pass


async def test_a_server_is_believed_again_once_its_authority_is_renewed(
    valkey: Valkey, tmp_path: Path
) -> None:
    authority = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority)
    with relaying(valkey.socket_path, context) as relay:
        url = f"rediss://127.0.0.1:{relay.port}"
        client = open_control_client(url, timeout_s=1.0, tls_ca=authority)
        assert isinstance(client, Redis)
        try:
            assert await client.execute_command("PING")
            make_certificate(tmp_path)  # the same file, for gateway and server
            context.load_cert_chain(authority)
            await client.connection_pool.disconnect()
            with pytest.raises(RedisConnectionError):
                await client.execute_command("PING")
            assert await client.execute_command("PING")
        finally:
            await client.aclose()


class _Failing:
    """A client that refuses everything and counts how often it was asked."""

    asked = 0

    async def execute_command(self, *args: Any) -> Any:
        self.asked += 1
        raise RedisConnectionError("user:password@host refused")


async def test_one_try_each_counted_and_logged_without_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.named_cache_store._QUIET_S", 0.02)
    client, failures = _Failing(), []
    store = RedisNamedCacheStore(client, SECRET, on_failure=lambda: failures.append(1))
    named = NamedCaches(store, SECRET, clock=Clock())
    owner = named.owner("acme", None)
    with capture_logs() as logs:
        await named.live(owner)
        await named.live(owner)
        assert (client.asked, len(failures)) == (1, 1)
        await asyncio.sleep(0.03)
        await named.live(owner)
    assert (client.asked, len(failures)) == (2, 2)
    assert len(logs) == 1
    assert "password" not in str(logs)
