"""One model's replicas as the operator handles them: opened, added, drained and taken away."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Generic, Protocol

import structlog

from gateway.dispatch.member import Member, ReplicaT_co, Routable
from gateway.dispatch.router import Router

_log = structlog.get_logger("forebay.fleet")


class Closable(Routable, Protocol):
    """A replica that can be ended."""

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests and wait until the running ones are done, or the time is up."""
        ...

    async def close(self) -> None:
        """Stop for good and give everything back. Idempotent."""
        ...


class ReplicaGroup(Generic[ReplicaT_co]):
    """Owns the replicas of one router: each is closed once, when retired or with the group."""

    def __init__(self, router: Router[ReplicaT_co]) -> None:
        self.router = router
        self._held: dict[str, AsyncExitStack] = {}

    def hold(
        self, member: Member[ReplicaT_co], held: AsyncExitStack, *, tells_events: bool
    ) -> None:
        """Send requests there from now on; `held` closes all that belongs to it."""
        self.router.add(member, tells_events=tells_events)
        self._held[member.name] = held

    async def retire(self, name: str, timeout_s: float) -> None:
        """Drain a replica and take it away: what still runs there after `timeout_s` moves on to
        another. Without effect on one that is not there."""
        member = self.router.find(name)
        if member is None:
            return
        member.draining = True
        self.router.changed()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await member.load.wait_empty()
        if member.load.sequences:
            _log.warning("drain time is over", replica=name, sequences=member.load.sequences)
        await self._end(name)
        _log.info("replica removed", replica=name, model=self.router.model)

    async def _end(self, name: str) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            try:
                await held.aclose()
            finally:
                self.router.remove(name)

    async def close(self) -> None:
        """End all of them, at once. What still runs there has nowhere to go."""
        for member in self.router.members:
            member.draining = True
        results = await asyncio.gather(
            *(self._end(name) for name in list(self._held)), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                _log.error("a replica could not be closed", exc_info=result)
