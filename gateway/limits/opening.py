"""Opens the limiter that the settings ask for."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from gateway.ended_tasks import end_task
from gateway.limits.calls import Sender
from gateway.limits.link import LimitsLink
from gateway.limits.local import LocalLimiter
from gateway.limits.seeds import Seeds, Spent
from gateway.limits.shared import SharedLimiter
from gateway.limits.sharing import Sharing
from gateway.limits.telling import Telling
from gateway.named_cache_store import open_control_client
from policies.limit_book import LimitBook
from policies.limit_window import WindowShape

_CLIENT_S = 5.0
"""Of the client itself; exchanges have shorter limits of their own."""
_KEEP_S = 0.5
"""For what no request waits for."""


@asynccontextmanager
async def open_limiter(
    redis_url: str | None,
    *,
    spent: Spent,
    gateways: Callable[[], int],
    timeout_s: float = 0.05,
    tls_ca: Path | None = None,
    cluster: bool = False,
    shape: WindowShape | None = None,
    lease_s: float = 30.0,
) -> AsyncIterator[LocalLimiter | SharedLimiter]:
    """Limits that all gateways on one Redis keep together, or without a URL each process its part.

    `gateways` is how many share the limits, this one included: where there is a Redis, what it says
    while that answers goes on to hold when it does not. `lease_s` is after which the places of a
    gateway that has died come free. A Redis that does not answer is not an error: it is used once
    it does.
    """
    book = LimitBook(shape)
    async with AsyncExitStack() as held:
        seeds = Seeds(spent)
        held.push_async_callback(seeds.close)
        if redis_url is None:
            yield LocalLimiter(seeds, gateways=gateways, book=book)
            return
        client = open_control_client(redis_url, timeout_s=_CLIENT_S, tls_ca=tls_ca, cluster=cluster)
        held.push_async_callback(client.aclose)
        sender = Sender(secrets.token_hex(8), book.shape, lease_s)
        asking = LimitsLink(client, timeout_s=timeout_s)
        held.push_async_callback(asking.close)
        keeping = LimitsLink(client, timeout_s=max(timeout_s, _KEEP_S))
        held.push_async_callback(keeping.close)
        telling = Telling(asking, sender, book)
        sharing = Sharing(telling, sender, asking, keeping, gateways)
        held.push_async_callback(sharing.last_word)
        await sharing.recover()
        for work in (sharing.keep(), sharing.tell()):
            held.push_async_callback(end_task, asyncio.create_task(work, name="limits"))
        yield SharedLimiter(asking, telling, sharing, sender, seeds, book)
