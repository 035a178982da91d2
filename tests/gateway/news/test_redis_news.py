"""Gateways that hear of each other through a real server, and do without when it is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from redis.exceptions import ReadOnlyError
from structlog.testing import capture_logs

from gateway.named_cache_store import open_control_client
from gateway.news.fleet_news import NO_LOAD, FleetNews, OwnLoad
from gateway.news.redis_news import RedisNews, open_news
from gateway.news.sealed_news import NewsKind, NewsSealer
from gateway.news.streams import KEYS, NewsStreams
from tests.cache.tls_proxy import tls_proxy
from tests.cache.valkey import Valkey, free_port, running_valkey
from tests.gateway.news.prefixes import long_prefix, prefix
from tests.gateway.stage import eventually

SECRET = b"server secret"
ROUTED, LOADS = KEYS[NewsKind.ROUTED], KEYS[NewsKind.LOADS]


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as server:
        yield server


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence and outages are noticed, and over, sooner than in production."""
    monkeypatch.setattr("gateway.news.peers.SILENCE_S", 0.4)
    monkeypatch.setattr("gateway.news.redis_news._HEARTBEAT_S", 0.05)
    monkeypatch.setattr("gateway.news.redis_news._FIRST_RETRY_S", 0.02)
    monkeypatch.setattr("gateway.news.redis_news._LAST_RETRY_S", 0.1)


class Ear:
    """Keeps what was heard, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, tuple[bytes, ...]]] = []

    def __call__(self, replica: str, links: Sequence[bytes]) -> None:
        self.heard.append((replica, tuple(links)))


@asynccontextmanager
async def gateway(
    server: Valkey, ear: Ear | None = None, *, secret: bytes = SECRET, **options: Any
) -> AsyncIterator[RedisNews]:
    """One gateway's news, after it has read what there was."""
    options = {"timeout_s": 1.0, **options}
    async with open_news(server.url, secret, on_routed=ear or Ear(), **options) as news:
        assert await news.caught_up(10)
        yield news


def foreign(news: FleetNews, replica: str) -> OwnLoad:
    return news.foreign(replica, time.monotonic())


async def test_two_gateways_hear_of_each_other_within_100_ms(valkey: Valkey) -> None:
    here_ear, there_ear = Ear(), Ear()
    async with gateway(valkey, here_ear) as here, gateway(valkey, there_ear) as there:
        await eventually(lambda: here.gateways == there.gateways == 2)
        took_s = []
        for number in range(1, 6):
            began_s = time.monotonic()
            here.routed("r1", prefix("system" + "x" * number))
            here.loads({"r1": OwnLoad(100 * number, number, 2, 3000), "idle": NO_LOAD})
            await eventually(lambda n=number: len(there_ear.heard) == n)
            await eventually(lambda n=number: foreign(there, "r1").waiting == n)
            took_s.append(time.monotonic() - began_s)
        assert median(took_s) < 0.1
        assert there_ear.heard[-1] == ("r1", prefix("systemxxxxx"))
        assert foreign(there, "r1") == OwnLoad(500, 5, 2, 3000)
        assert foreign(here, "r1") == NO_LOAD  # its own is not foreign
        assert here_ear.heard == []
        assert (here.counts.told, there.counts.heard, there.counts.refused) == (5, 5, 0)
        here.loads({})
        await eventually(lambda: foreign(there, "r1") == NO_LOAD)
        assert not here.degraded


async def test_three_gateways_are_summed_and_who_ends_is_gone_at_once(valkey: Valkey) -> None:
    async with gateway(valkey) as listener, gateway(valkey) as second:
        async with gateway(valkey) as third:
            second.loads({"r": OwnLoad(running=1)})
            third.loads({"r": OwnLoad(running=2)})
            await eventually(lambda: foreign(listener, "r").running == 3)
            assert listener.gateways == 3
        await eventually(lambda: foreign(listener, "r").running == 1, within_s=1.0)
        assert listener.gateways == 2


async def test_who_has_taken_over_from_a_server_is_found(valkey: Valkey, tmp_path: Path) -> None:
    """The old one answers still, on the connections that there are, and refuses to write."""
    directory, name = tmp_path / "other", tmp_path / "name"
    directory.mkdir()
    name.symlink_to(valkey.socket_path)
    client = open_control_client(f"unix://{name}", timeout_s=2.0)
    streams = NewsStreams(client, 1.0)
    try:
        with running_valkey(directory) as other:
            await streams.add(NewsKind.LOADS, [b"to the one"])
            name.unlink()
            name.symlink_to(other.socket_path)
            with valkey.client() as old:
                old.execute_command("REPLICAOF", "127.0.0.1", "1")
            for _ in range(2):
                with pytest.raises(ReadOnlyError):
                    await streams.add(NewsKind.LOADS, [b"lost"])
            await streams.disconnect()
            await streams.add(NewsKind.LOADS, [b"to the other"])
            with other.client() as new:
                assert new.xlen(LOADS) == 1
    finally:
        await client.aclose()


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize(("failures", "said"), [(1, []), (2, ["warning", "info"])])
async def test_no_connection_outlives_a_failure(failures: int, said: list[str]) -> None:
    """And one failure at the start, whose loop may be held up, is not worth a warning."""

    class Demoted(NewsStreams):
        """Refuses to write until it is connected to anew."""

        def __init__(self) -> None:
            self.failures = self.connections = 0

        async def add(self, kind: NewsKind, messages: Sequence[bytes]) -> None:
            if self.connections < failures:
                self.failures += 1
                raise ReadOnlyError("READONLY You can't write against a read only replica.")

        async def disconnect(self) -> None:
            self.connections += 1

        def resume(self) -> None:
            pass

        async def read(self, *, wait: bool) -> list[tuple[NewsKind, bytes]]:
            await asyncio.sleep(1.0 if wait else 0.0)
            return []

    streams = Demoted()
    news = RedisNews(streams, SECRET, on_routed=Ear(), clock=time.monotonic)
    running = asyncio.create_task(news.run())
    try:
        with capture_logs() as logs:
            assert await news.caught_up(5)
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert (streams.failures, streams.connections) == (failures, failures)
    assert [line["log_level"] for line in logs] == said


@pytest.mark.usefixtures("_soon")
async def test_who_falls_silent_counts_nothing(valkey: Valkey) -> None:
    client = open_control_client(valkey.url, timeout_s=2.0)
    try:
        news = RedisNews(NewsStreams(client, 1.0), SECRET, on_routed=Ear(), clock=time.monotonic)
        crashing = asyncio.create_task(news.run())
        async with gateway(valkey) as listener:
            news.loads({"r": OwnLoad(running=1)})
            await eventually(lambda: foreign(listener, "r").running == 1)
            crashing.cancel()
            await asyncio.gather(crashing, return_exceptions=True)
            await eventually(lambda: listener.gateways == 1)
            assert foreign(listener, "r") == NO_LOAD
    finally:
        await client.aclose()


async def test_loads_that_change_all_the_time_are_told_at_a_bounded_rate(valkey: Valkey) -> None:
    async with gateway(valkey) as here, gateway(valkey) as there:
        await eventually(lambda: there.gateways == 2)
        began_s, before = time.monotonic(), here.counts.sent_bytes
        for number in range(1, 300):
            here.loads({"r": OwnLoad(number)})
            await asyncio.sleep(0.001)
        await eventually(lambda: foreign(there, "r").pending_tokens == 299)
        took_s = time.monotonic() - began_s
        message_bytes = 37 + 1 + 3 + 32
        told = (here.counts.sent_bytes - before) / message_bytes
        assert 2 <= told <= took_s / 0.05 + took_s / 0.5 + 2


async def test_leaving_at_any_moment_leaves_nothing_behind(valkey: Valkey) -> None:
    for turns in range(0, 40, 2):
        async with open_news(valkey.url, SECRET, on_routed=Ear()) as news:
            if turns % 4:
                assert await news.caught_up(5)
            for _ in range(turns):
                await asyncio.sleep(0)
    assert {task.get_name() for task in asyncio.all_tasks()}.isdisjoint(
        {"news", "news-hear", "news-tell"}
    )
    with valkey.client() as client:
        await eventually(lambda: len(client.client_list()) == 1)  # the one that asks


async def test_a_cold_gateway_reads_what_was_told_before_it_came(valkey: Valkey) -> None:
    prompts = [long_prefix(seed % 60, 60 + seed) for seed in range(100)]
    async with gateway(valkey) as first:
        for links in prompts:
            first.routed("r", links)
        await eventually(lambda: first.counts.told == 100)
        with valkey.client() as client:
            await eventually(lambda: client.xlen(ROUTED) > 16)
    ear = Ear()
    async with gateway(valkey, ear) as cold:
        assert ear.heard == [("r", links) for links in prompts]
        assert cold.gateways == 1
        assert cold.counts.unresolved == 0


async def test_a_cold_gateway_after_a_trim_understands_what_is_whole(valkey: Valkey) -> None:
    async with gateway(valkey) as first:
        first.routed("r", prefix("abc"))
        await eventually(lambda: first.counts.sent_bytes and first.counts.told == 1)
        with valkey.client() as client:
            await eventually(lambda: client.xlen(ROUTED) == 1)
            client.delete(ROUTED)
        first.routed("r", prefix("abcd"))
        first.routed("r", prefix("xyz"))
        with valkey.client() as client:
            await eventually(lambda: client.xlen(ROUTED) == 1)
        ear = Ear()
        async with gateway(valkey, ear) as cold:
            assert ear.heard == [("r", prefix("xyz"))]
            assert cold.counts.unresolved == 1


@pytest.mark.usefixtures("_soon")
async def test_a_frozen_server_holds_up_nothing_and_is_caught_up_with(valkey: Valkey) -> None:
    ear = Ear()
    async with (
        gateway(valkey, timeout_s=0.1) as here,
        gateway(valkey, ear, timeout_s=0.1) as there,
    ):
        await eventually(lambda: here.gateways == there.gateways == 2)
        here.routed("r", prefix("before"))
        await eventually(lambda: len(ear.heard) == 1)
        with capture_logs() as logs:
            valkey.freeze()
            try:
                here.loads({"r": OwnLoad(running=7)})
                await eventually(lambda: here.degraded and there.degraded)
                began_s = time.monotonic()
                for number in range(500):
                    here.routed("r", prefix(f"meanwhile {number}"))
                    here.loads({"r": OwnLoad(running=number)})
                    assert foreign(here, "r") == NO_LOAD
                assert time.monotonic() - began_s < 0.5
                await eventually(lambda: here.gateways == 1)
            finally:
                valkey.thaw()
            await eventually(lambda: len(ear.heard) == 501, within_s=5)
            await eventually(lambda: foreign(there, "r").running == 499)
            await eventually(lambda: not here.degraded and not there.degraded)
        assert ear.heard[-1] == ("r", prefix("meanwhile 499"))
        assert here.counts.dropped == 0
        levels = [line["log_level"] for line in logs]
        assert sorted(levels) == ["info", "info", "warning", "warning"]  # of two gateways


@pytest.mark.usefixtures("_soon")
async def test_a_server_that_died_and_is_back_empty_is_used_again(valkey: Valkey) -> None:
    ear = Ear()
    async with gateway(valkey) as here, gateway(valkey, ear) as there:
        here.routed("r", prefix("abc"))
        await eventually(lambda: len(ear.heard) == 1)
        with capture_logs() as logs:
            valkey.kill()
            await eventually(lambda: here.degraded and there.degraded)
            here.routed("r", prefix("abcdef"))
            await eventually(lambda: here.gateways == 1)
            valkey.start()
            await eventually(lambda: len(ear.heard) == 2, within_s=5)
            assert ear.heard[-1] == ("r", prefix("abcdef"))
            await eventually(lambda: here.gateways == there.gateways == 2)
            await eventually(lambda: not here.degraded and not there.degraded)
        assert len(logs) == 4
        # what was told before the server lost it is told as a whole to who comes now
        cold = Ear()
        async with gateway(valkey, cold):
            assert cold.heard == [("r", prefix("abcdef"))]


@pytest.mark.usefixtures("_soon")
async def test_it_starts_and_ends_without_a_server(tmp_path: Path) -> None:
    nobody = Valkey(tmp_path)
    with capture_logs() as logs:
        async with open_news(nobody.url, SECRET, on_routed=Ear()) as news:
            await eventually(lambda: bool(logs))
            assert not await news.caught_up(0.05)
            news.routed("r", prefix("abc"))
            assert news.degraded
            assert (news.gateways, foreign(news, "r")) == (1, NO_LOAD)
    assert [line["log_level"] for line in logs] == ["warning"]


@pytest.mark.usefixtures("_soon")
async def test_a_server_that_refuses_writes_is_an_outage_said_once(valkey: Valkey) -> None:
    async with gateway(valkey) as news:
        with capture_logs() as logs, valkey.client() as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 1)
            await eventually(lambda: news.degraded)
            refused = client.info("stats")["total_error_replies"]
            await eventually(lambda: client.info("stats")["total_error_replies"] >= refused + 3)
            client.config_set("maxmemory", 0)
            await eventually(lambda: not news.degraded)
        assert [line["log_level"] for line in logs] == ["warning", "info"]


async def test_another_secret_and_garbage_are_ignored_counted_and_said_once(
    valkey: Valkey,
) -> None:
    ear = Ear()
    with capture_logs() as logs:
        async with gateway(valkey, ear) as here, gateway(valkey, secret=b"another") as foe:
            foe.routed("r", prefix("poison"))
            foe.loads({"r": OwnLoad(running=1000)})
            await eventually(lambda: foe.counts.told == 1 and here.counts.refused >= 3)
            refused = here.counts.refused
            own = NewsSealer(SECRET)
            with valkey.client() as client:
                client.xadd(ROUTED, {"m": b"garbage"})
                client.xadd(ROUTED, {"other": b"field"})
                client.xadd(ROUTED, {"m": own.seal(NewsKind.ROUTED, b"no message")})
                client.xadd(LOADS, {"m": own.seal(NewsKind.LOADS, b"")})
                client.xadd(LOADS, {"m": own.seal(NewsKind.ROUTED, b"\0" * 4)})
            await eventually(lambda: here.counts.refused >= refused + 5)
            assert ear.heard == []
            assert foreign(here, "r") == NO_LOAD
            assert here.gateways == 1
            assert not here.degraded
    assert len(logs) == 2  # each of the two says it of the other


async def test_redis_holds_neither_text_nor_names_nor_links_and_no_ttl(valkey: Valkey) -> None:
    async with gateway(valkey) as news:
        news.routed("secret-replica", prefix("abc"))
        news.loads({"secret-replica": OwnLoad(running=1)})
        with valkey.client() as client:
            await eventually(lambda: client.xlen(ROUTED) == 1 and client.xlen(LOADS) > 1)
            assert set(client.keys("*")) == {ROUTED.encode(), LOADS.encode()}
            stored = b"".join(
                fields[b"m"] for key in (ROUTED, LOADS) for _, fields in client.xrange(key)
            )
            assert client.ttl(ROUTED) == client.ttl(LOADS) == -1
    assert b"secret-replica" not in stored
    assert prefix("a")[0] not in stored


@pytest.mark.usefixtures("_soon")
async def test_a_listener_that_fails_is_said_and_hearing_goes_on(valkey: Valkey) -> None:
    heard: list[str] = []

    def fails_first(replica: str, links: Sequence[bytes]) -> None:
        heard.append(replica)
        if len(heard) == 1:
            raise KeyError(replica)

    with capture_logs() as logs:
        async with open_news(valkey.url, SECRET, on_routed=fails_first) as there:
            assert await there.caught_up(5)
            async with gateway(valkey) as here:
                here.routed("r1", prefix("abc"))
                await eventually(lambda: heard == ["r1"])
                here.routed("r2", prefix("abc"))
                await eventually(lambda: heard == ["r1", "r2"])
    assert [line["log_level"] for line in logs] == ["error"]


async def test_old_decisions_are_trimmed_and_not_read(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.news.redis_news._TRIM_S", 0.0)
    now_ms = time.time_ns() // 1_000_000
    with valkey.client() as client:
        for number in range(400):
            client.xadd(ROUTED, {"m": b"old"}, id=f"{now_ms - 400_000 + number}-0")
        async with gateway(valkey) as news:
            assert news.counts.refused == 0
            news.routed("r", prefix("abc"))
            await eventually(lambda: client.xlen(ROUTED) <= 101)  # whole nodes of the stream go


async def test_a_place_ahead_of_a_server_that_lost_everything_is_given_up(valkey: Valkey) -> None:
    client = open_control_client(valkey.url, timeout_s=2.0)
    try:
        streams = NewsStreams(client, 1.0)
        with valkey.client() as other:
            other.xadd(ROUTED, {"m": b"from the future"}, id=f"{2**53}-0")
            assert await streams.read(wait=False) == [(NewsKind.ROUTED, b"from the future")]
            other.flushall()
        await streams.add(NewsKind.ROUTED, [b"now"])
        assert await streams.read(wait=False) == []
        streams.resume()
        assert await streams.read(wait=True) == [(NewsKind.ROUTED, b"now")]
    finally:
        await client.aclose()


async def _hear_each_other(url: str, **options: Any) -> None:
    ear = Ear()
    async with (
        open_news(url, SECRET, on_routed=Ear(), timeout_s=2.0, **options) as here,
        open_news(url, SECRET, on_routed=ear, timeout_s=2.0, **options) as there,
    ):
        here.routed("r", prefix("abc"))
        here.loads({"r": OwnLoad(running=1)})
        await eventually(lambda: ear.heard == [("r", prefix("abc"))], within_s=5)
        await eventually(lambda: foreign(there, "r").running == 1)


async def test_over_tcp_with_a_password(tmp_path: Path) -> None:
    with running_valkey(tmp_path, {"requirepass": "pa55"}, tcp=True) as server:
        await _hear_each_other(f"redis://:pa55@127.0.0.1:{server.port}/2")


async def test_over_tls(valkey: Valkey, tmp_path: Path) -> None:
    with tls_proxy(tmp_path, valkey.socket_path) as (relay, authority):
        await _hear_each_other(f"rediss://127.0.0.1:{relay.port}", tls_ca=authority)


async def test_a_cluster(tmp_path: Path) -> None:
    options = {"cluster-enabled": "yes", "cluster-port": str(free_port())}
    with running_valkey(tmp_path, options, tcp=True) as server:
        with server.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            # a node waits two seconds before it takes writes
            await eventually(
                lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok", 10
            )
        await _hear_each_other(server.url, cluster=True)
