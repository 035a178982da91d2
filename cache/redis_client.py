"""redis-py as the link uses it: its clients, what is asked of them, and how they fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import AbstractConnection, ConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from cache.redis_connection import Progress, TcpConnection, TlsConnection, UnixConnection
from cache.redis_options import RedisOptions

TROUBLE = (RedisError, RedisClusterException, OSError, TimeoutError)
"""What redis-py raises when Redis, or the way to it, does not work."""

CONNECT_S = 2.0
"""Time for name look-up, TLS and log-in. Nobody waits for it: it happens while the link is down."""

_SCAN_COUNT = 1000

Command = tuple[bytes | str | int | memoryview, ...]


async def pipelined(
    client: Redis | RedisCluster, commands: Sequence[Command], take: Callable[[Any], None]
) -> None:
    """One connection's replies are taken one by one: a large value is used and freed while it is in
    the processor's cache. A cluster's come together, from all its nodes."""
    if isinstance(client, RedisCluster):
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        for reply in await pipeline.execute(raise_on_error=False):
            if isinstance(reply, RedisConnectionError):
                raise reply
            take(reply)
        return
    connection = await client.connection_pool.get_connection()  # type: ignore[no-untyped-call]  # its decorator has no types
    try:
        await connection.send_packed_command(connection.pack_commands(commands))
        for _ in commands:
            try:
                reply = await connection.read_response()
            except ResponseError as refusal:
                reply = refusal
            take(reply)
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    finally:
        await client.connection_pool.release(connection)


async def drop_connections(client: object, *, in_use: bool) -> None:
    """Let what is asked next of a `redis.asyncio` client make a connection of its own; those that
    are `in_use` are dropped only if that is said.

    A server may answer, and yet be no longer the one that its name stands for: one that was failed
    over from refuses to write, on connections that are as good as ever. A cluster says itself who
    has taken over, and keeps its own. Raises TROUBLE.
    """
    if isinstance(client, Redis):
        await client.connection_pool.disconnect(inuse_connections=in_use)


async def scanned(
    client: Redis | RedisCluster, node: ClusterNode | None, cursor: int, pattern: bytes
) -> tuple[Any, Any]:
    """The next cursor and some keys."""
    if isinstance(client, RedisCluster):
        asked: Any = client.scan(cursor, match=pattern, count=_SCAN_COUNT, target_nodes=node)
        cursors, keys = await asked
        return next(iter(cursors.values())), keys
    asked = client.scan(cursor, match=pattern, count=_SCAN_COUNT)
    cursor, keys = await asked
    return cursor, keys


def _connection_settings(options: RedisOptions) -> dict[str, Any]:
    settings: dict[str, Any] = dict(parse_url(options.url))
    scheme = options.url.split("://", 1)[0]
    settings.pop("connection_class", None)
    settings.pop("max_connections", None)
    if options.tls_ca is not None and scheme == "rediss":
        settings["ssl_ca_certs"] = options.tls_ca
    # RESP2: hiredis returns plain bytes either way, and there is no hand-shake to fail.
    return settings | {
        "protocol": 2,
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": None,
        "retry": Retry(NoBackoff(), 0),
    }


def plain_client(options: RedisOptions, progress: Progress) -> Redis:
    scheme = options.url.split("://", 1)[0]
    classes: dict[str, type[AbstractConnection]] = {"unix": UnixConnection, "rediss": TlsConnection}
    pool: ConnectionPool = ConnectionPool(
        connection_class=classes.get(scheme, TcpConnection),
        max_connections=options.max_connections,
        progress=progress,
        **_connection_settings(options),
    )
    return Redis.from_pool(pool)


def check_settings(options: RedisOptions) -> None:
    """Raises ValueError for parameters in the URL that redis-py does not know; connects nowhere."""
    pool = plain_client(options, Progress()).connection_pool
    try:
        pool.make_connection()  # type: ignore[no-untyped-call]  # redis-py's, without types
    except TypeError:
        raise ValueError("url: has a parameter that is not known") from None


async def cluster_client(options: RedisOptions, progress: Progress) -> RedisCluster:
    settings = _connection_settings(options)
    host, port = settings.pop("host", "localhost"), settings.pop("port", 6379)
    settings.pop("db", None)
    tls = options.url.startswith("rediss://")
    client = RedisCluster(
        host=host, port=port, max_connections=options.max_connections, ssl=tls, **settings
    )
    # redis-py has no argument for the class of a cluster's connections; nodes found from here on
    # take it from these keywords.
    connection_class = TlsConnection if tls else TcpConnection
    client.connection_kwargs |= {"connection_class": connection_class, "progress": progress}
    for node in client.nodes_manager.startup_nodes.values():
        node.connection_class = connection_class
        node.connection_kwargs["progress"] = progress
    await client.initialize()
    return client


def reason_of(error: BaseException) -> str:
    """Why, in a few words, with nothing of ours in it: some errors quote what was sent."""
    # While connecting, redis-py wraps it in a ConnectionError.
    if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
        return "user or password refused"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, RedisClusterException):
        return "the cluster cannot be reached"
    if isinstance(error, ResponseError):
        code = str(error).split(" ", 1)[0]  # redis-py cuts the codes that it knows
        return f"refused ({code if code.isupper() else type(error).__name__})"
    if isinstance(error, RedisConnectionError | OSError):
        return "cannot connect, or the connection was lost"
    return type(error).__name__
