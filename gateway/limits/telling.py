"""Tells Redis what has become of requests, beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from time import monotonic
from typing import Any

from redis.exceptions import RedisError

from cache.redis_client import TROUBLE, Command
from gateway.limits.calls import Sender, apply_arguments, read_apply
from gateway.limits.desk import Batch, Desk
from gateway.limits.link import LimitsLink
from policies.limit_book import LimitBook

_FORGET_AFTER_S = 600.0
_PASSES = 4
"""What was sent before, what is new, and what has come up meanwhile; one for a lost memory."""
_DESKS_AT_ONCE = 16


class Telling:
    """The desks of all tenants. `generation` is raised when it is not known any more what of the
    calls that were under way has been carried out.

    Whatever a desk sends goes the way that reservations go, in order: so places that came free a
    moment ago are free for who asks next.
    """

    def __init__(self, link: LimitsLink, sender: Sender, book: LimitBook) -> None:
        """`link` is the way of reservations."""
        self.generation = 1
        self.replayed = 0
        self._link = link
        self._sender = sender
        self._book = book
        self._desks: dict[str, Desk] = {}
        self._behind: set[Desk] = set()
        self._numbers = count(1)
        self._wake = asyncio.Event()
        self._forgotten_losses = 0

    @property
    def desks(self) -> Iterable[Desk]:
        """Of the tenants that are in use here."""
        return self._desks.values()

    @property
    def backlog(self) -> int:
        """Entries that are yet to be told."""
        return sum(desk.backlog for desk in list(self._desks.values()))

    @property
    def memory_losses(self) -> int:
        """Times that Redis had forgotten a tenant."""
        return self._forgotten_losses + sum(
            desk.memory_losses for desk in list(self._desks.values())
        )

    def desk(self, tenant: str) -> Desk:
        """Made if it is not known."""
        desk = self._desks.get(tenant)
        if desk is None:
            desk = self._desks[tenant] = Desk(tenant, self._book.shape, monotonic())
        return desk

    def known(self, tenant: str) -> Desk | None:
        """The desk, if there is one."""
        return self._desks.get(tenant)

    def soon(self, desk: Desk) -> None:
        """It may have something to tell."""
        if desk.behind:
            self._behind.add(desk)
            self._wake.set()
        else:
            self._behind.discard(desk)

    def undo(self, desk: Desk, request: str) -> None:
        """A request that Redis may or may not have let in is not to be."""
        desk.undo(request)
        self.soon(desk)

    async def wait(self) -> None:
        """Until there is something to tell."""
        await self._wake.wait()
        self._wake.clear()

    def send_all(self, on_failure: Callable[[BaseException], None]) -> None:
        """One batch of each tenant that has something to tell and waits for no confirmation."""
        for desk in [desk for desk in self._behind if not desk.waits]:
            self.send(desk, on_failure)

    def send(self, desk: Desk, on_failure: Callable[[BaseException], None]) -> None:
        """What it has to tell, if there is anything. `on_failure` is called if that does not
        arrive; then it is told when the gateway catches up."""
        if desk.behind:
            batch = desk.next_batch(self._numbers)
            answer = self._link.ask(self._call(desk, batch))
            answer.add_done_callback(partial(self._answered, desk, batch, on_failure))

    async def catch_up(self, link: LimitsLink) -> None:
        """Tell all of it, also what was decided here alone and who is in flight, and what has come
        up while that was told, but for a rest. Raises TROUBLE."""
        for desk in self._desks.values():
            desk.renew()
        for _ in range(_PASSES):
            for desk in self._desks.values():
                desk.tell_all()
            desks = list(self._desks.values())
            for start in range(0, len(desks), _DESKS_AT_ONCE):
                await self._round(link, desks[start : start + _DESKS_AT_ONCE])

    def tell_all_soon(self) -> None:
        """What was decided here alone and has not been told."""
        for desk in self._desks.values():
            desk.tell_all()
            self.soon(desk)

    def renew_soon(self) -> None:
        """Every tenant's leases; those in use without any ask whether Redis still knows them."""
        for desk in self._desks.values():
            desk.renew()
            self.soon(desk)

    def forget_idle(self, now_s: float) -> None:
        """Desks that nobody has come to for ten minutes."""
        for tenant, desk in list(self._desks.items()):
            if desk.idle and now_s - desk.used_s > _FORGET_AFTER_S:
                self._forgotten_losses += desk.memory_losses
                del self._desks[tenant]

    def _call(self, desk: Desk, batch: Batch) -> Command:
        rest = apply_arguments(
            batch.number, batch.before, batch.epoch, batch.operations, monotonic()
        )
        return self._sender.call(desk.tenant, "apply", self.generation, *rest)

    async def _round(self, link: LimitsLink, desks: list[Desk]) -> None:
        told = [(desk, batch) for desk in desks for batch in desk.all_batches(self._numbers)]
        answers = await asyncio.gather(
            *[link.ask(self._call(desk, batch)) for desk, batch in told], return_exceptions=True
        )
        errors = []
        for (desk, batch), answer in zip(told, answers, strict=True):
            if isinstance(answer, BaseException):
                errors.append(answer)
            elif self._take(desk, batch, answer):
                self.replayed += 1
            else:
                errors.append(RedisError("a batch came before another one"))
        if errors:
            raise next((error for error in errors if not isinstance(error, TROUBLE)), errors[0])

    def _answered(
        self,
        desk: Desk,
        batch: Batch,
        on_failure: Callable[[BaseException], None],
        answer: asyncio.Future[Any],
    ) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        if error is not None:
            on_failure(error)
        elif not self._take(desk, batch, answer.result()):
            on_failure(RedisError("a batch came before another one"))

    def _take(self, desk: Desk, batch: Batch, answer: Sequence[Any]) -> bool:
        """False if it has to be sent again, after others."""
        status, epoch, missing = read_apply(answer)
        if status == "applied":
            desk.arrived(batch)
        desk.heard(epoch, self._book)
        desk.without_lease(missing)
        self.soon(desk)
        return status != "gap"
