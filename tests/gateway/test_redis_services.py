"""Which of two servers is what the `redis` section says, and what stands on the other one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.metrics import Metrics
from gateway.named_cache_store import RedisNamedCacheStore, open_control_client
from gateway.named_caches import NamedCaches
from gateway.news.redis_news import open_news
from gateway.redis_services import RedisServices, open_redis
from gateway.settings_redis import RedisSettings
from tests.cache.tls_proxy import tls_proxy
from tests.cache.valkey import free_port, running_valkey
from tests.gateway.stage import eventually
from tests.gateway.test_named_caches import Clock, entry, make

SECRET = b"server secret"


@asynccontextmanager
async def opened(**settings: object) -> AsyncIterator[RedisServices]:
    redis = RedisSettings.model_validate({"timeout_ms": 1000} | settings)
    metrics = Metrics(["m"], ["acme"], SECRET)
    async with open_redis(redis, {}, SECRET, metrics) as services:
        yield services


async def keeps_names(services: RedisServices) -> bool:
    """Whether a name that is made is there for another gateway of the same settings."""
    named = NamedCaches(services.named, SECRET, clock=Clock())
    owner = named.owner("acme", None)
    await make(named, entry(owner))
    assert services.url is not None
    client = open_control_client(services.url, timeout_s=1.0, cluster=services.cluster)
    try:
        other = NamedCaches(RedisNamedCacheStore(client, SECRET), SECRET, clock=Clock())
        return await other.find(owner, "handbook") is not None
    finally:
        await client.aclose()


async def test_the_authority_of_the_kv_server_is_of_no_account_to_one_without_tls(
    tmp_path: Path,
) -> None:
    with (
        running_valkey(tmp_path) as server,
        tls_proxy(tmp_path, server.socket_path) as (relay, authority),
    ):
        kv_url = f"rediss://127.0.0.1:{relay.port}"
        async with opened(url=server.url, kv_url=kv_url, tls_ca=authority) as services:
            assert services.kv is not None
            assert services.kv.up
            assert await keeps_names(services)
        async with open_news(
            server.url, SECRET, on_routed=lambda *_: None, tls_ca=authority
        ) as news:
            await eventually(lambda: not news.degraded)


async def test_a_cluster_for_kv_alone_and_one_for_everything(tmp_path: Path) -> None:
    options = {"cluster-enabled": "yes", "cluster-port": str(free_port())}
    plain_directory = tmp_path / "plain"
    plain_directory.mkdir()
    with (
        running_valkey(tmp_path, options, tcp=True) as node,
        running_valkey(plain_directory, tcp=True) as plain,
    ):
        with node.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            # a node waits two seconds before it takes writes
            await eventually(
                lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok", 10
            )
        async with opened(url=plain.url, kv_url=node.url, cluster=True) as services:
            assert not services.cluster
            assert await keeps_names(services)
        async with opened(url=node.url) as services:
            assert services.cluster  # it was not said, and found out
            assert await keeps_names(services)


async def test_names_are_in_memory_while_a_cluster_is_away() -> None:
    async with opened(url=f"redis://127.0.0.1:{free_port()}", cluster=True) as services:
        named = NamedCaches(services.named, SECRET, clock=Clock())
        owner = named.owner("acme", None)
        await make(named, entry(owner))
        assert await named.find(owner, "handbook") is not None
        assert await named.erase_tenant("acme", None) == (1, False)
