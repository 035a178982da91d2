"""Whether gateways count together now, and what keeps it so."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic

import structlog

from cache.breaker import Breaker
from cache.redis_client import TROUBLE, Command, reason_of
from gateway.limits.calls import Sender
from gateway.limits.link import LimitsLink
from gateway.limits.sweeping import Sweeper
from gateway.limits.telling import Telling

_log = structlog.get_logger("forebay.limits")

_NOBODY = "-"  # no tenant's id
_PACE_S = 0.002
"""Between two times of telling: what ends in the same moment is told together."""
_TICK_S = 1.0
_SWEEP_EVERY_S = 60.0
_CONNECT_S = 2.0
_LAST_WORD_S = 1.0
_FIRST_RETRY_S = 0.25
_LAST_RETRY_S = 2.0
_REMEMBERED_TICKS = 60


class Sharing:
    """One call that fails or takes too long ends it. It begins anew when Redis answers and has been
    told of everything since.

    How many gateways there are is asked while it lasts: they hear of each other through the same
    Redis, so that one that has lost it would soon think that it is alone.
    """

    def __init__(
        self,
        telling: Telling,
        sender: Sender,
        asking: LimitsLink,
        keeping: LimitsLink,
        gateways: Callable[[], int],
    ) -> None:
        """`asking` is the way of reservations, `keeping` one for what none waits for."""
        self.on = False
        self.parts = max(1, gateways())
        self.outages = 0
        self._asking = asking
        self._keeping = keeping
        self._telling = telling
        self._sender = sender
        self._gateways = gateways
        self._fleet_sizes: deque[int] = deque(maxlen=_REMEMBERED_TICKS)
        self._breaker = Breaker(1, _FIRST_RETRY_S, _LAST_RETRY_S, starts_open=True)
        self._sweeper = Sweeper(
            keeping, lambda tenant: sender.call(tenant, "sweep", telling.generation)
        )
        self._tick_s = min(_TICK_S, sender.lease_s / 3)
        self._wake = asyncio.Event()
        self._renew_at_s = 0.0
        self._sweep_at_s = 0.0
        self._said = False

    def lost(self, error: BaseException) -> None:
        """A call has failed: each gateway goes on by itself."""
        if not self.on:
            return
        self.on = False
        self.outages += 1
        self._telling.generation += 1
        self.parts = max(1, *self._fleet_sizes, self._gateways())
        self._breaker.stall(monotonic())
        self._wake.set()
        self._say_lost(error)

    async def recover(self) -> None:
        """Begin to share, if it is time to try and Redis answers."""
        if not self._breaker.start_probe(monotonic()):
            return
        try:
            question = self._sender.call(_NOBODY, "time", self._telling.generation)
            await self._keeping.disconnect()
            await self._connect_both(question)
            await self._asking.ask(question)  # in the time that a reservation has
            await self._telling.catch_up(self._keeping)
        except TROUBLE as error:
            self._breaker.probe_failed(monotonic())
            if not self._fleet_sizes:
                self.parts = max(1, self._gateways())
            self._say_lost(error)
            return
        except BaseException:
            self._breaker.probe_failed(monotonic())
            raise
        self._breaker.probe_succeeded()
        self.on = True
        self._telling.tell_all_soon()
        if self._said:
            self._said = False
            _log.info("Redis answers again: limits are counted together")

    async def _connect_both(self, question: Command) -> None:
        """At once: one after the other they would take the same connection, and the second one
        would have to be made in the time of an exchange."""
        ends = await asyncio.gather(
            self._keeping.connect(question, _CONNECT_S),
            self._asking.connect(question, _CONNECT_S),
            return_exceptions=True,
        )
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    async def tell(self) -> None:
        """Tell Redis what has come to an end, until cancelled."""
        while True:
            await self._telling.wait()
            await asyncio.sleep(_PACE_S)
            if self.on:
                self._telling.send_all(self.lost)

    async def keep(self) -> None:
        """Renew leases, sweep, and find out when Redis answers again, until cancelled."""
        while True:
            wait_s = None if self.on else self._breaker.wait_s(monotonic())
            try:
                async with asyncio.timeout(self._tick_s if wait_s is None else wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                if self.on:
                    await self._tick(monotonic())
                else:
                    await self.recover()
            except TROUBLE as error:
                self.lost(error)
            except Exception:  # noqa: BLE001 - a bug here must not end it for good
                _log.exception("looking after the limits in Redis failed; trying again")

    async def last_word(self) -> None:
        """Tell what there is to tell, if that can be done quickly. After `tell` and `keep`."""
        if not self.on:
            return
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await self._telling.catch_up(self._keeping)
        except TROUBLE as error:
            self.lost(error)

    async def _tick(self, now_s: float) -> None:
        self._fleet_sizes.append(self._gateways())
        if now_s >= self._renew_at_s:
            self._renew_at_s = now_s + self._sender.lease_s / 3
            self._telling.forget_idle(now_s)
            self._telling.renew_soon()
            await self._sweeper.name([desk.tenant for desk in self._telling.desks], now_s)
        if now_s >= self._sweep_at_s:
            self._sweep_at_s = now_s + _SWEEP_EVERY_S
            await self._sweeper.page()

    def _say_lost(self, error: BaseException) -> None:
        if not self._said:
            self._said = True
            _log.warning(
                "Redis does not count limits: each gateway keeps to its part of them",
                reason=reason_of(error),
                gateways=self.parts,
            )
