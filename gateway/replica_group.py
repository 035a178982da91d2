"""One model's replicas as the operator handles them: opened, added, drained and taken away."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Generic

import structlog

from gateway.dispatch.member import Member, ReplicaT_co
from gateway.dispatch.router import Router

_log = structlog.get_logger("forebay.fleet")


class ReplicaGroup(Generic[ReplicaT_co]):
    """Owns the replicas of one router: each is closed once, when retired or with the group."""

    def __init__(self, router: Router[ReplicaT_co]) -> None:
        self.router = router
        self._held: dict[str, AsyncExitStack] = {}
        self._ends: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    def hold(
        self, member: Member[ReplicaT_co], held: AsyncExitStack, *, tells_events: bool
    ) -> None:
        """Send requests there from now on; what `held` closes is closed with the replica, and
        `held` is empty then. Raises ValueError, and takes nothing over, for a name that is taken
        and once the group is closed."""
        if self._closed:
            raise ValueError("the gateway is shutting down")
        self.router.add(member, tells_events=tells_events)
        self._held[member.name] = held.pop_all()

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
        if self.router.find(name) is not member:
            return  # somebody else has taken it away meanwhile
        if member.load.sequences:
            _log.warning("drain time is over", replica=name, sequences=member.load.sequences)
        member.draining = True  # also if it was resumed: it is going to be closed
        # it is closed in full also if whoever waits here is cancelled
        await asyncio.shield(self._ending(name))
        _log.info("replica removed", replica=name, model=self.router.model)

    def _ending(self, name: str) -> asyncio.Task[None]:
        """The one task that ends this replica, whoever asks for that."""
        task = self._ends.get(name)
        if task is None:
            task = self._ends[name] = asyncio.create_task(self._end(name))
            task.add_done_callback(lambda _: self._ends.pop(name))
        return task

    async def _end(self, name: str) -> None:
        try:
            if (held := self._held.pop(name, None)) is not None:
                await held.aclose()
        finally:
            self.router.remove(name)

    async def close(self) -> None:
        """End all of them, at once, and take no others. What still runs there has nowhere to go."""
        self._closed = True
        for member in self.router.members:
            member.draining = True
        results = await asyncio.gather(
            *[self._ending(name) for name in (*self._held, *self._ends)], return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                _log.error("a replica could not be closed", exc_info=result)
