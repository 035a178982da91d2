"""What was spent before anybody counted, from the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import NamedTuple

import structlog

from policies.limit_standing import BudgetId

_log = structlog.get_logger("forebay.limits")

Spent = Callable[[str, str | None, str | None, float], Awaitable[int]]
"""Tenant, and key or model if it is about one of them, and the Unix time of a period's begin: what
requests that came since have cost, in nUSD. Rows that wait to be written here are to be in it."""


class Seed(NamedTuple):
    """What was spent of a budget. `asked_s` is when the ledger was asked (`time.monotonic`); None,
    as the ledger could not say: count on with a guess, which is not to be kept."""

    nusd: int
    asked_s: float | None


_PATIENCE_S = 2.0
_ASK_AGAIN_S = 5.0


class Seeds:
    """Asks for each budget once, however many requests wait for it. A ledger that cannot answer is
    left alone for five seconds."""

    def __init__(self, spent: Spent) -> None:
        self._spent = spent
        self._asking: dict[BudgetId, asyncio.Task[Seed]] = {}
        self._quiet_until_s = float("-inf")
        self.failures = 0
        self.failing = False

    @property
    def ask_again_s(self) -> float:
        """When the ledger may be asked again (`time.monotonic`), after it could not answer."""
        return self._quiet_until_s

    async def of(self, budget: BudgetId) -> Seed | None:
        """What requests that are over have cost; None if the ledger cannot say."""
        if monotonic() < self._quiet_until_s:
            return None
        task = self._asking.get(budget)
        if task is None:
            task = asyncio.create_task(self._ask(budget), name="limits-seed")
            self._asking[budget] = task
            task.add_done_callback(lambda task: self._asked(budget, task))
        try:
            # those who wait are not its owners: one that leaves must not end it for the others
            seed = await asyncio.shield(task)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the database raises
            self._failed(error)
            return None
        if self.failing:
            self.failing = False
            _log.info("the ledger answers again: budgets are summed up")
        return seed

    async def close(self) -> None:
        """End what is under way."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _asked(self, budget: BudgetId, task: asyncio.Task[Seed]) -> None:
        self._asking.pop(budget, None)
        if not task.cancelled():
            task.exception()  # seen, also if nobody waits any more

    async def _ask(self, budget: BudgetId) -> Seed:
        tenant, scope, name = budget.account
        asked_s = monotonic()
        async with asyncio.timeout(_PATIENCE_S):
            nusd = await self._spent(
                tenant,
                name if scope == "key" else None,
                name if scope == "model" else None,
                budget.start_s,
            )
        return Seed(nusd, asked_s)

    def _failed(self, error: Exception) -> None:
        if monotonic() < self._quiet_until_s:
            return  # another one who waited for the same answer
        self._quiet_until_s = monotonic() + _ASK_AGAIN_S
        self.failures += 1
        if not self.failing:
            self.failing = True
            # the kind of error only: its text may repeat what was sent
            _log.warning(
                "the ledger cannot say what was spent: budgets count from what is known here",
                error=type(error).__name__,
            )
