"""What the configuration's `redis` section brings up, and takes down again in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog

from cache.redis_client import CONNECT_S
from cache.redis_options import RedisOptions
from cache.redis_store import RedisStore
from gateway.embedded_redis import embedded_redis
from gateway.metrics import Metrics
from gateway.named_cache_store import (
    MemoryStore,
    NamedCacheStore,
    RedisNamedCacheStore,
    open_control_client,
)
from gateway.settings_errors import ConfigError
from gateway.settings_redis import EMBEDDED, OFF, RedisSettings
from gateway.state_dir import StateDir

_log = structlog.get_logger("forebay.redis")

_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class RedisServices:
    """`kv` is where KV blocks go (None: nowhere), `kv_options` how another process gets there.
    `named` keeps the tenants' named prefixes. `url` is where everything but KV is kept, None if
    nowhere; `cluster` says that a node of a cluster is there."""

    kv: RedisStore | None
    kv_options: RedisOptions | None
    named: NamedCacheStore
    url: str | None
    cluster: bool = False


@asynccontextmanager
async def open_redis(
    settings: RedisSettings, environ: Mapping[str, str], secret: bytes, metrics: Metrics
) -> AsyncIterator[RedisServices]:
    """Start the embedded server if one is wanted, and connect.

    A Redis that does not answer is not an error: it is used once it does. Raises ConfigError if it
    belongs to gateways with another secret, whose KV this one could not read nor they its.
    """
    async with AsyncExitStack() as held:
        embedded: str | None = None
        if settings.embedded:
            embedded = await _start_embedded(settings, environ, secret, held)
        url, kv_url = (
            embedded if wanted == EMBEDDED else None if wanted == OFF else wanted
            for wanted in (settings.url, settings.for_kv)
        )
        options = None if kv_url is None else _kv_options(settings, kv_url, secret)
        kv = None if options is None else await _connect(options, held)
        # `cluster` is said, or found out, of the server for KV: another one may be none
        cluster = kv is not None and url == kv_url and (settings.cluster or kv.facts.cluster)
        named: NamedCacheStore = MemoryStore()
        if url is not None:
            timeout_s = settings.timeout_ms / 1e3
            client = open_control_client(
                url,
                timeout_s=max(timeout_s, CONNECT_S),
                tls_ca=settings.tls_ca,
                cluster=cluster,
            )
            held.push_async_callback(client.aclose)
            names = RedisNamedCacheStore(
                client, secret, timeout_s=timeout_s, on_failure=metrics.named_cache_store_failed
            )
            held.push_async_callback(names.close)
            named = names
        yield RedisServices(kv, options, named, url, cluster)


async def _start_embedded(
    settings: RedisSettings, environ: Mapping[str, str], secret: bytes, held: AsyncExitStack
) -> str | None:
    """Its socket's URL; None, with a warning, where there is no server to start."""
    server = embedded_redis(StateDir.open(environ), settings.memory, environ, secret=secret)
    url = await asyncio.to_thread(server.__enter__)
    held.push_async_callback(asyncio.to_thread, server.__exit__, None, None, None)
    return url


def _kv_options(settings: RedisSettings, url: str, secret: bytes) -> RedisOptions:
    return RedisOptions(
        url=url,
        secret=secret,
        cluster=settings.cluster and url.startswith(("redis:", "rediss:")),
        timeout_s=settings.timeout_ms / 1e3,
        max_connections=settings.max_connections,
        ttl_s=settings.ttl,
        encrypt=settings.encrypt,
        tls_ca=None if settings.tls_ca is None else str(settings.tls_ca),
    )


async def _connect(options: RedisOptions, held: AsyncExitStack) -> RedisStore:
    store = RedisStore(options)
    store.start()
    held.push_async_callback(asyncio.to_thread, store.close, _CLOSE_S)
    agrees = await asyncio.to_thread(store.check_secret, _CLOSE_S)
    if agrees is False:
        raise ConfigError(
            [
                "redis: this Redis is in use under another server secret; give all gateways the "
                "same one (server.secret_env), this one another Redis, or, if the secret has "
                "changed for good, empty it (FLUSHDB)"
            ]
        )
    return store
