"""Limits that one process keeps by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from time import monotonic

from gateway.errors import ApiError
from gateway.http_call import Header
from gateway.limits.answers import limit_headers, refusal
from gateway.limits.ceilings import ceilings_of
from gateway.limits.counts import TOO_LARGE, LimitCounts, no_refusals
from gateway.limits.limiter import Reservation
from gateway.limits.reservation import UNLIMITED, BookReservation
from gateway.limits.seeds import Seeds
from gateway.tenants import Caller
from policies.limit_book import Granted, LimitBook, Refused
from policies.limit_standing import Ceiling, Standing, obstacle, share_of
from policies.limits import Demand

_NOTHING = Demand(0, 0)


class LocalLimiter:
    """`gateways` says how many processes share the tenants' limits without hearing of each other's
    requests; each keeps to its part."""

    def __init__(
        self,
        seeds: Seeds,
        *,
        gateways: Callable[[], int] = lambda: 1,
        book: LimitBook | None = None,
        clock: Callable[[], float] = monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._book = book if book is not None else LimitBook()
        self._seeds = seeds
        self._gateways = gateways
        self._clock = clock
        self._unix_clock = unix_clock
        self._refused = no_refusals()

    @property
    def degraded(self) -> bool:
        """Whether budgets are guessed, as the ledger cannot be asked."""
        return self._seeds.failing

    @property
    def counts(self) -> LimitCounts:
        """What it has done so far."""
        return LimitCounts(
            refused=dict(self._refused),
            degraded=self.degraded,
            ledger_failures=self._seeds.failures,
            accounts=len(self._book),
        )

    async def reserve(self, caller: Caller, model: str, demand: Demand) -> Reservation:
        """See `Limiter.reserve`. Waits for nothing but the ledger, once per budget and period."""
        ceilings = ceilings_of(caller, model)
        if not ceilings:
            return UNLIMITED
        granted = await self.granted(ceilings, demand, self._gateways())
        return BookReservation(
            self._book,
            granted.holding,
            granted.ceilings,
            granted.standings,
            degraded=self.degraded,
            clock=self._clock,
        )

    async def granted(
        self,
        ceilings: Sequence[Ceiling],
        demand: Demand,
        gateways: int,
        *,
        degraded: bool = False,
    ) -> Granted:
        """What is let in as one of so many. Raises a 429 ApiError."""
        while True:
            now_s, unix_s = self._clock(), self._unix_clock()
            result = self._book.reserve(ceilings, demand, now_s, unix_s, gateways)
            if isinstance(result, Granted):
                return result
            if isinstance(result, Refused):
                raise self.refusal(
                    result.ceilings,
                    result.standings,
                    demand,
                    unix_s,
                    degraded=degraded or self.degraded,
                )
            for budget in result.budgets:
                seed = await self._seeds.of(budget)
                if seed is None:
                    self._book.seed(budget, None, self._clock(), self._seeds.ask_again_s)
                else:
                    self._book.seed(budget, seed.nusd, self._clock())

    def refusal(
        self,
        ceilings: Sequence[Ceiling],
        standings: Sequence[Standing],
        demand: Demand,
        unix_s: float,
        *,
        degraded: bool,
    ) -> ApiError:
        """The answer to a request that has no room, which is counted."""
        found = obstacle(ceilings, standings, demand, unix_s)
        self._refused[TOO_LARGE if found.wait_s is None else found.dimension] += 1
        return refusal(found, limit_headers(ceilings, standings, degraded=degraded))

    def headers(self, caller: Caller) -> list[Header]:
        """See `Limiter.headers`."""
        return self.headers_alone(ceilings_of(caller, None), self._gateways())

    def headers_alone(
        self, ceilings: Sequence[Ceiling], gateways: int, *, degraded: bool = False
    ) -> list[Header]:
        """As one of so many."""
        standings = self._book.standings(ceilings, self._clock(), self._unix_clock())
        if gateways > 1:
            ceilings = [
                Ceiling(account, share_of(limits, gateways, standing, None, _NOTHING))
                for (account, limits), standing in zip(ceilings, standings, strict=True)
            ]
        return limit_headers(ceilings, standings, degraded=degraded or self.degraded)
