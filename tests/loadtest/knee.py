"""A made-up server whose share of kept promises at each rate is known, for tests to find."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from loadtest.columns import ColumnRecords, Columns
from loadtest.plan import TenantPlan
from loadtest.record import ClientHealth, Run
from policies.slo import Slo
from tests.loadtest.some_records import answer, run_of

PROMISED = (TenantPlan("acme", slo=Slo(ttft_s=0.5, tpot_s=0.12, target=0.95)),)
STALLED = "sent up to 31 ms late"


@dataclass
class Knee:
    """`share(rate)` of `requests` in each run are kept, the same ones for the same seed; above
    `client_limit` the client complains. `measured` are the rates and repetitions asked for."""

    share: Callable[[float], float]
    seed: int = 0
    requests: int = 400
    client_limit: float = math.inf
    tenants: tuple[TenantPlan, ...] = PROMISED
    measured: list[tuple[float, int]] = field(default_factory=list)

    async def measure(self, rate: float, repetition: int) -> Run:
        """One run, as `find_max` asks for it."""
        self.measured.append((rate, repetition))
        random = np.random.default_rng((self.seed, len(self.measured)))
        kept = random.random(self.requests) < self.share(rate)
        sent_s = np.arange(self.requests) / rate
        first_s = sent_s + np.where(kept, 0.1, 0.9)
        columns = replace(
            _answers(self.requests),
            due_s=sent_s,
            sent_s=sent_s,
            first_s=first_s,
            last_s=first_s + 0.1,
            ended_s=first_s + 0.1,
        )
        stalled = rate > self.client_limit
        late_s = 0.031 if stalled else 0.0
        health = ClientHealth(0, 0, late_s, late_s, 0, 1, (STALLED,) if stalled else ())
        wall_s = self.requests / rate
        return run_of(ColumnRecords(columns), self.tenants, wall_s=wall_s, client=health)


@lru_cache
def _answers(count: int) -> Columns:
    return Columns.of([answer(100.0, 10.0, tenant="acme")] * count)


def soft(middle: float, width: float) -> Callable[[float], float]:
    """A logistic share: one half at the middle."""
    return lambda rate: 1 / (1 + math.exp(min((rate - middle) / width, 500.0)))


def sharp(knee: float) -> Callable[[float], float]:
    """Nearly all are kept up to the knee, and few beyond."""
    return lambda rate: 0.995 if rate <= knee else 0.6
