"""What a Redis server says of itself, and whether it is fit to share."""

from __future__ import annotations

import hashlib
import hmac
import logging
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ResponseError

_log = logging.getLogger("forebay.cache")

SECRET_CHECK_KEY = b"forebay:secret-check"
_SECRET_CHECK_TEXT = b"forebay/secret-check/1"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """From INFO; empty before the first connection, and where INFO is not permitted."""

    version: str = ""
    maxmemory_policy: str = ""
    maxmemory_bytes: int = 0
    cluster: bool = False
    run_id: str = ""
    """Of this node's process: another one may hold nothing of what this one held."""

    def is_same_life(self, before: ServerFacts) -> bool:
        """Whether certainly no process but that of `before` answers. Of a cluster only one node was
        asked."""
        return bool(self.run_id) and self.run_id == before.run_id and not self.cluster

    @property
    def danger(self) -> str | None:
        """What its eviction policy may do to others who use it, or None."""
        if self.maxmemory_policy.startswith("allkeys"):
            return "KV may push out other keys"
        if self.maxmemory_policy == "noeviction" and self.maxmemory_bytes:
            return "once full, it refuses everybody's writes"
        return None


async def read_facts(client: Redis) -> ServerFacts:
    """Raises what redis-py raises, except for a user that may not ask."""
    try:
        info: dict[str, Any] = await client.info()
    except ResponseError as refusal:
        _log.debug("Redis does not answer INFO: %s", type(refusal).__name__)
        return ServerFacts()
    if "valkey_version" in info:
        version = f"valkey {info['valkey_version']}"
    else:
        version = f"redis {info.get('redis_version', 'unknown')}"
    return ServerFacts(
        version=version,
        maxmemory_policy=str(info.get("maxmemory_policy", "")),
        maxmemory_bytes=int(info.get("maxmemory", 0)),
        cluster=bool(info.get("cluster_enabled")),
        run_id=str(info.get("run_id", "")),
    )


async def same_secret(client: Redis | RedisCluster, secret: bytes) -> bool | None:
    """Whether Redis is in use under this server secret: the first to come leaves a keyed digest,
    all others compare. None if nothing is there and nothing can be stored."""
    ours = hmac.digest(secret, _SECRET_CHECK_TEXT, hashlib.sha256)
    try:
        await client.set(SECRET_CHECK_KEY, ours, nx=True)
    except ResponseError as refusal:
        # Full or read-only; what is there can still be compared.
        _log.debug("Redis refused to store the secret check: %s", type(refusal).__name__)
    theirs: Any = await client.get(SECRET_CHECK_KEY)
    return None if theirs is None else hmac.compare_digest(theirs, ours)
