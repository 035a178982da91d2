"""Removes what tenants that have gone quiet leave behind in Redis, where nothing expires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from cache.redis_client import Command
from gateway.limits.link import LimitsLink
from gateway.limits.script import TENANTS_KEY

_PAGE = 100
_NAMED_AGAIN_S = 3600.0


class Sweeper:
    """Goes through the tenants that any gateway has named, a page at a time; what is still in use
    is left."""

    def __init__(self, link: LimitsLink, sweep_call: Callable[[str], Command]) -> None:
        self._link = link
        self._sweep_call = sweep_call
        self._cursor = b"0"
        self._named_s: dict[str, float] = {}

    async def name(self, tenants: Iterable[str], now_s: float) -> None:
        """Tenants that are counted. Raises TROUBLE."""
        named_s = {tenant: self._named_s.get(tenant, float("-inf")) for tenant in tenants}
        new = [tenant for tenant, at_s in named_s.items() if now_s - at_s > _NAMED_AGAIN_S]
        if new:
            await self._link.ask(("SADD", TENANTS_KEY, *new))
        self._named_s = named_s | dict.fromkeys(new, now_s)

    async def page(self) -> None:
        """The next page. Raises TROUBLE."""
        asked = ("SSCAN", TENANTS_KEY, self._cursor, "COUNT", _PAGE)
        self._cursor, found = await self._link.ask(asked)
        tenants = [tenant.decode(errors="replace") for tenant in found]
        swept = await asyncio.gather(
            *[self._link.ask(self._sweep_call(tenant)) for tenant in tenants]
        )
        gone = [tenant for tenant, (kept,) in zip(tenants, swept, strict=True) if kept == b"gone"]
        if gone:
            for tenant in gone:
                self._named_s.pop(tenant, None)
            await self._link.ask(("SREM", TENANTS_KEY, *gone))
