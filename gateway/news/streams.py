"""The two streams in Redis that news go through.

`forebay:news:{fleet}:routed` holds decisions: about 8,192 messages at most, of up to some
4 KiB each, none much older than `_BACKLOG_S`. It is its own snapshot: who comes late reads it from
the start, then follows. `forebay:news:{fleet}:loads` holds loads, of which only the last seconds
matter. Both keys are in one slot, so that one blocking read follows both, on a cluster as well.
Neither has a TTL, lest it be evicted in favour of KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis, RedisCluster

from cache.redis_client import drop_connections
from gateway.news.peers import SILENCE_S
from gateway.news.sealed_news import NewsKind

KEYS = {
    NewsKind.ROUTED: "forebay:news:{fleet}:routed",
    NewsKind.LOADS: "forebay:news:{fleet}:loads",
}
BLOCK_S = 1.0
"""How long a read waits for news; the client's own timeout must be longer."""

_KINDS = {key.encode(): kind for kind, key in KEYS.items()}
_FIELD = b"m"
_MOST = {NewsKind.ROUTED: 8_192, NewsKind.LOADS: 64}
"""Of each, as far as Redis is exact about it."""
_SLICE = 16  # messages of each stream in one read
_BACKLOG_S = 300.0


class NewsStreams:
    """Adds to the streams and reads on where it stopped. Each exchange takes `timeout_s` at most,
    and a read that waits `BLOCK_S` more.

    Every method raises RedisError, OSError or TimeoutError when Redis does not do as it should.
    """

    def __init__(self, client: Redis | RedisCluster, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._read_to = dict.fromkeys(NewsKind, "0-0")
        self._now_ms = 0

    async def add(self, kind: NewsKind, messages: Sequence[bytes]) -> None:
        """At least one message, in one round trip."""
        # its commands are typed as if they were sent at once
        pipe: Any = self._client.pipeline(transaction=False)
        async with asyncio.timeout(self._timeout_s), pipe:
            for message in messages:
                pipe.xadd(KEYS[kind], {_FIELD: message}, maxlen=_MOST[kind])
            entry_ids = await pipe.execute()
        self._now_ms = _milliseconds(entry_ids[-1].decode())

    async def trim(self) -> None:
        """Let decisions go that are too old to be of use."""
        oldest_ms = max(self._now_ms - int(_BACKLOG_S * 1e3), 0)
        async with asyncio.timeout(self._timeout_s):
            await self._client.xtrim(KEYS[NewsKind.ROUTED], minid=str(oldest_ms))

    async def disconnect(self) -> None:
        """Let the next exchange make a connection of its own; see `drop_connections`."""
        await drop_connections(self._client, in_use=True)

    def resume(self) -> None:
        """Read on where reading stopped before the connection was lost; something must have been
        added since. What is too old is skipped. A place ahead of the server's time is given up: it
        has lost everything, and its clock was put back."""
        for kind, age_s in ((NewsKind.ROUTED, _BACKLOG_S), (NewsKind.LOADS, SILENCE_S)):
            oldest_ms = max(self._now_ms - int(age_s * 1e3), 0)
            if not oldest_ms <= _milliseconds(self._read_to[kind]) <= self._now_ms:
                self._read_to[kind] = f"{oldest_ms}-0"

    async def read(self, *, wait: bool) -> list[tuple[NewsKind, bytes]]:
        """The next messages, oldest first, by kind; none if there are none (within `BLOCK_S`)."""
        block_s = BLOCK_S if wait else 0.0
        async with asyncio.timeout(self._timeout_s + block_s):
            found: Any = await self._client.xread(
                {KEYS[kind]: read_to for kind, read_to in self._read_to.items()},
                count=_SLICE,
                block=int(block_s * 1e3) if wait else None,
            )
        messages = []
        for key, entries in found:
            kind = _KINDS[key]
            for entry_id, fields in entries:
                self._read_to[kind] = entry_id.decode()
                messages.append((kind, fields.get(_FIELD, b"")))
        return messages


def _milliseconds(entry_id: str) -> int:
    """The server's time at which an entry was added."""
    return int(entry_id.partition("-")[0])
