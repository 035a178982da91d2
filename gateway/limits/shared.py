"""Limits that gateways keep together, in Redis, and each by itself while that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from time import monotonic
from typing import NamedTuple

from cache.redis_client import TROUBLE
from gateway.http_call import Header
from gateway.limits.answers import limit_headers
from gateway.limits.calls import (
    BudgetPart,
    ReserveAnswer,
    Sender,
    account_name,
    budget_part,
    read_reserve,
    reserve_arguments,
)
from gateway.limits.ceilings import ceilings_of
from gateway.limits.counts import LimitCounts
from gateway.limits.desk import Desk, InFlight
from gateway.limits.limiter import Reservation
from gateway.limits.link import LimitsLink
from gateway.limits.local import LocalLimiter
from gateway.limits.reservation import UNLIMITED, BookReservation
from gateway.limits.seeds import Seed, Seeds
from gateway.limits.sharing import Sharing
from gateway.limits.telling import Telling
from gateway.tenants import Caller
from policies.limit_book import LimitBook
from policies.limit_standing import BudgetId, Ceiling, Standing
from policies.limits import Demand


class _Answered(NamedTuple):
    request: str
    answer: ReserveAnswer


class SharedReservation(BookReservation):
    """A holding that Redis knows of, or will."""

    __slots__ = ("_desk", "_in_flight", "_telling")

    def __init__(
        self,
        telling: Telling,
        desk: Desk,
        in_flight: InFlight,
        book: LimitBook,
        ceilings: Sequence[Ceiling],
        standings: Sequence[Standing],
        *,
        degraded: bool,
    ) -> None:
        super().__init__(book, in_flight.holding, ceilings, standings, degraded=degraded)
        self._telling = telling
        self._desk = desk
        self._in_flight = in_flight

    def settle(self, tokens: int, cost_nusd: int) -> None:
        """What was used, here at once and in Redis soon; the first call counts."""
        if self._book.settle(self.holding, tokens, cost_nusd):
            self._desk.settled(self._in_flight, monotonic())
            self._telling.soon(self._desk)

    def release(self) -> None:
        """The request is over, here at once and in Redis soon. Idempotent."""
        if not self.holding.released:
            now_s = monotonic()
            self._book.release(self.holding, now_s)
            self._desk.over(self._in_flight, now_s)
            self._telling.soon(self._desk)


class SharedLimiter:
    """One script and one round trip for each reservation; what becomes of it is told beside the
    requests.

    The first call that fails or takes too long ends sharing: from then on this gateway keeps to its
    part of each limit by what it has let in itself, the last minute included, and does not wait for
    Redis again. Once that answers, it is told of everything since, and sharing goes on.

    What that may let in beyond a limit, in a minute in which Redis is lost: at most what each of
    the other gateways may by itself, so less than the limit once more; where a request is larger
    than a gateway's part, one such request for each. Where Redis comes back empty, each gateway
    tells what it let in in the last minute at its next call of the tenant, or a third of a lease
    later; until all have, what they had let in is missing.
    """

    def __init__(
        self,
        asking: LimitsLink,
        telling: Telling,
        sharing: Sharing,
        sender: Sender,
        seeds: Seeds,
        book: LimitBook,
    ) -> None:
        self._asking = asking
        self._telling = telling
        self._sharing = sharing
        self._sender = sender
        self._seeds = seeds
        self._book = book
        self._alone = LocalLimiter(seeds, book=book)
        self._requests = count(1)

    @property
    def degraded(self) -> bool:
        """Whether each gateway keeps to its part by itself, or budgets are guessed."""
        return not self._sharing.on or self._seeds.failing

    @property
    def counts(self) -> LimitCounts:
        """What it has done so far."""
        alone = self._alone.counts
        return LimitCounts(
            refused=alone.refused,
            degraded=self.degraded,
            outages=self._sharing.outages,
            journal=self._telling.backlog,
            replayed=self._telling.replayed,
            memory_losses=self._telling.memory_losses,
            ledger_failures=alone.ledger_failures,
            accounts=alone.accounts,
        )

    async def reserve(self, caller: Caller, model: str, demand: Demand) -> Reservation:
        """See `Limiter.reserve`."""
        ceilings = ceilings_of(caller, model)
        if not ceilings:
            return UNLIMITED
        desk = self._telling.desk(caller.tenant.id)
        desk.used_s = monotonic()
        if self._sharing.on:
            reservation = await self._reserve_together(desk, ceilings, demand)
            if reservation is not None:
                return reservation
        return await self._reserve_alone(desk, ceilings, demand)

    def headers(self, caller: Caller) -> list[Header]:
        """See `Limiter.headers`: as Redis said last, less what has passed since."""
        ceilings = ceilings_of(caller, None)
        if not self._sharing.on:
            return self._alone.headers_alone(ceilings, self._sharing.parts, degraded=True)
        desk = self._telling.known(caller.tenant.id)
        now_s = monotonic()
        standings = [
            Standing(0, 0, 0) if desk is None else desk.standing(account, now_s)
            for account, _ in ceilings
        ]
        return limit_headers(ceilings, standings, degraded=self.degraded)

    async def _reserve_together(
        self, desk: Desk, ceilings: Sequence[Ceiling], demand: Demand
    ) -> Reservation | None:
        """None if Redis does not say."""
        seeds: dict[BudgetId, Seed] = {}
        while self._sharing.on:
            answered = await self._ask(desk, ceilings, demand, seeds)
            if answered is None:
                continue
            answer, now_s = answered.answer, monotonic()
            known = desk.heard(answer.epoch, self._book)
            if answer.status == "granted":
                return self._let_in(desk, ceilings, answered, now_s, known=known)
            self._telling.soon(desk)
            if answer.status == "stale":
                continue
            desk.note(ceilings, answer.standings, now_s)
            if answer.status == "unseeded":
                await self._seed(ceilings, answer.standings, seeds, now_s)
                continue
            standings = [
                standing._replace(mean_s=self._book.account(account, now_s).mean_s)
                for (account, _), standing in zip(ceilings, answer.standings, strict=True)
            ]
            raise self._alone.refusal(
                ceilings, standings, demand, answer.unix_s, degraded=self.degraded
            )
        return None

    async def _ask(
        self,
        desk: Desk,
        ceilings: Sequence[Ceiling],
        demand: Demand,
        seeds: dict[BudgetId, Seed],
    ) -> _Answered | None:
        """None if Redis did not say, which ends sharing."""
        request = self._new_id()
        command = self._sender.call(
            desk.tenant,
            "reserve",
            self._telling.generation,
            *reserve_arguments(request, ceilings, demand, seeds, monotonic()),
        )
        self._telling.send(desk, self._sharing.lost)
        asked = self._asking.ask(command, lambda: self._telling.undo(desk, request))
        try:
            return _Answered(request, read_reserve(await asked))
        except asyncio.CancelledError:
            if not asked.cancelled():  # it had been answered, which nobody reads any more
                asked.exception()
                self._telling.undo(desk, request)
            raise
        except TROUBLE as error:
            self._telling.undo(desk, request)
            self._sharing.lost(error)
            return None

    def _let_in(
        self,
        desk: Desk,
        ceilings: Sequence[Ceiling],
        answered: _Answered,
        now_s: float,
        *,
        known: bool,
    ) -> Reservation:
        """`known` is whether Redis still knows of it, as far as has been heard."""
        request, answer = answered
        kept = [
            standing if counted else standing._replace(spent_nusd=None)
            for standing, counted in zip(answer.standings, answer.counted, strict=True)
        ]
        holding = self._book.admit(ceilings, kept, answer.tokens, answer.cost_nusd, now_s)
        parts = _parts(ceilings, answer.standings)
        in_flight = InFlight(request, holding, parts, _counted(ceilings), told=True)
        desk.note(ceilings, answer.standings, now_s)
        desk.take_in(in_flight, now_s)
        if not known:
            desk.adopt(in_flight)
        self._telling.soon(desk)
        return self._reservation(desk, in_flight, ceilings, answer.standings)

    async def _reserve_alone(
        self, desk: Desk, ceilings: Sequence[Ceiling], demand: Demand
    ) -> Reservation:
        granted = await self._alone.granted(ceilings, demand, self._sharing.parts, degraded=True)
        now_s = monotonic()
        parts = _parts(ceilings, granted.standings)
        in_flight = InFlight(self._new_id(), granted.holding, parts, _counted(ceilings), told=False)
        desk.note(ceilings, granted.standings, now_s)
        desk.take_in(in_flight, now_s)
        if self._sharing.on:  # since a moment ago
            desk.adopt(in_flight)
            self._telling.soon(desk)
        return self._reservation(desk, in_flight, granted.ceilings, granted.standings)

    def _reservation(
        self,
        desk: Desk,
        in_flight: InFlight,
        ceilings: Sequence[Ceiling],
        standings: Sequence[Standing],
    ) -> Reservation:
        return SharedReservation(
            self._telling,
            desk,
            in_flight,
            self._book,
            ceilings,
            standings,
            degraded=self.degraded,
        )

    async def _seed(
        self,
        ceilings: Sequence[Ceiling],
        standings: Sequence[Standing],
        seeds: dict[BudgetId, Seed],
        now_s: float,
    ) -> None:
        """What was spent of the budgets that Redis knows nothing of: by the ledger, else as far as
        is known here."""
        for (account, limits), standing in zip(ceilings, standings, strict=True):
            if limits.budget_nusd is None or standing.spent_nusd is not None:
                continue
            per, start_s = limits.budget_per, standing.period_start_s
            budget = BudgetId(account, per, start_s)
            guess = self._book.account(account, now_s).budget(per, start_s).spent
            seeds[budget] = await self._seeds.of(budget) or Seed(guess, None)

    def _new_id(self) -> str:
        return f"{self._sender.gateway}.{next(self._requests):x}"


def _counted(ceilings: Sequence[Ceiling]) -> frozenset[str]:
    return frozenset(account_name(account) for account, limits in ceilings if limits.counts)


def _parts(ceilings: Sequence[Ceiling], standings: Sequence[Standing]) -> tuple[BudgetPart, ...]:
    return tuple(
        budget_part(
            account,
            None if limits.budget_nusd is None else limits.budget_per,
            standing.period_start_s,
        )
        for (account, limits), standing in zip(ceilings, standings, strict=True)
    )
