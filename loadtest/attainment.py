"""What share of a tenant's requests was answered as promised, and how surely."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from loadtest.columns import Columns
from loadtest.plan import TenantPlan
from loadtest.stats import student
from loadtest.stats.goodput import kept_rows
from loadtest.stats.interval import wilson

_BATCHES = 10
_FEWEST_IN_A_BATCH = 5


@dataclass(frozen=True, slots=True)
class Attainment:
    """How many of a tenant's `requests` were answered as promised, and the interval of the true
    share. Requests that wait in one queue are late together: `design_effect` of them say as much
    as one that is on its own would. `needed` is how many, all kept, it takes to show `target`."""

    tenant: str
    target: float
    kept: int
    requests: int
    design_effect: float
    low: float
    high: float
    needed: int

    @property
    def share(self) -> float:
        """0 to 1."""
        return self.kept / self.requests if self.requests else 0.0

    def __str__(self) -> str:
        interval = f"{self.low * 100:.1f}–{self.high * 100:.1f}"
        return f"{self.share * 100:.1f} %, {interval}, of {self.requests:,} requests"


def promising(tenants: Sequence[TenantPlan]) -> list[TenantPlan]:
    """Those with a promise. Raises ValueError if there is none, or one for all requests."""
    found = [tenant for tenant in tenants if tenant.slo.promises]
    if not found:
        raise ValueError("no tenant has a TTFT or TPOT that could hold or fail")
    for tenant in found:
        if not 0 < tenant.slo.target < 1:
            raise ValueError(
                f"{tenant.name}: no number of requests can show a target of "
                f"{tenant.slo.target * 100:g} %; take one between, such as 99 %"
            )
    return found


def attained(tenant: TenantPlan, runs: Sequence[Columns], confidence: float) -> Attainment:
    """Over all of these runs together; the interval covers the true share with `confidence`."""
    kept = [_kept_in_order(columns, tenant) for columns in runs]
    requests, total = sum(one.size for one in kept), sum(int(one.sum()) for one in kept)
    effect = _design_effect([batch for one in kept for batch in _batches(one)], confidence)
    low, high = 0.0, 1.0
    if requests:
        effective = max(requests / effect, 1.0)
        low, high = wilson(total / requests * effective, effective, confidence)
    return Attainment(
        tenant.name,
        tenant.slo.target,
        total,
        requests,
        effect,
        low,
        high,
        _needed(tenant.slo.target, confidence),
    )


def _kept_in_order(columns: Columns, tenant: TenantPlan) -> NDArray[np.bool_]:
    """Whether each of a tenant's requests was answered as promised, in the order of sending."""
    if tenant.name not in columns.tenant.names:
        return np.zeros(0, np.bool_)
    rows = np.flatnonzero(columns.tenant.codes == columns.tenant.names.index(tenant.name))
    ordered = rows[np.argsort(columns.due_s[rows], kind="stable")]
    return kept_rows(columns, [tenant])[ordered]


def _batches(kept: NDArray[np.bool_]) -> Iterator[NDArray[np.bool_]]:
    """Stretches of a run, one after the other; none of a run that is too short."""
    if kept.size >= _BATCHES * _FEWEST_IN_A_BATCH:
        yield from np.array_split(kept, _BATCHES)


def _design_effect(batches: Sequence[NDArray[np.bool_]], confidence: float) -> float:
    """How many times more the shares of batches vary than those of independent requests would; 1
    if they do not, or if there is nothing to tell it from.

    (L. Kish, "Survey Sampling", 1965, for clusters; batches of a sequence in time as in A. M. Law,
    "Simulation Modeling and Analysis", on batch means. An interval of a share takes it as so many
    times fewer requests, and fewer still for its being known from a few batches only: E. L. Korn
    and B. I. Graubard, Survey Methodology 24, 1998.)
    """
    if len(batches) < 2:
        return 1.0
    sizes = np.array([batch.size for batch in batches])
    kept = np.array([int(batch.sum()) for batch in batches])
    share = float(kept.sum() / sizes.sum())
    if not 0 < share < 1:
        return 1.0
    expected = float(sizes.mean()) * share * (1 - share)
    seen = float(np.sum((kept - sizes * share) ** 2)) / (len(batches) - 1)
    t = student.quantile(confidence, len(batches) - 1)
    return max(seen / expected * t * t / _squared_z(confidence), 1.0)


def _needed(target: float, confidence: float) -> int:
    """The fewest requests, all of them kept, whose interval is at `target` or above: of n kept of
    n, Wilson's lower bound is n / (n + z²)."""
    return math.ceil(_squared_z(confidence) * target / (1 - target) - 1e-9)


def _squared_z(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2) ** 2
