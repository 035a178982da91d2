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
from loadtest.tables import percent

_FEWEST_BATCHES, _MOST_BATCHES = 4, 10
_FEWEST_IN_A_BATCH = 5
_NOT_SLOW = 0.8
_FAR_BELOW = 0.25
"""Of a promise: what makes an answer slower than others but leaves it there breaks no promise."""


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
        return f"{percent(self.share)}, {interval}, of {self.requests:,} requests"


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
    ordered = [_in_order(columns, tenant) for columns in runs]
    kept = [kept_rows(columns, [tenant]) for columns in ordered]
    requests, total = sum(one.size for one in kept), sum(int(one.sum()) for one in kept)
    effect = max(_design_effect(kept, confidence), *_slowness_effects(tenant, ordered))
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


def _in_order(columns: Columns, tenant: TenantPlan) -> Columns:
    """A tenant's requests in the order of sending."""
    if tenant.name not in columns.tenant.names:
        return columns.take(np.zeros(0, np.int64))
    rows = np.flatnonzero(columns.tenant.codes == columns.tenant.names.index(tenant.name))
    return columns.take(rows[np.argsort(columns.due_s[rows], kind="stable")])


def _slowness_effects(tenant: TenantPlan, runs: Sequence[Columns]) -> Iterator[float]:
    """How many times more the slowest fifth of the answers varies from batch to batch than if each
    were slow by itself, for each time that was promised; and 1.

    Where every promise was kept there is nothing to see of their being broken together. But a line
    that makes answers slow makes late ones of the next: the slow come in clusters where the late
    would. (So does the theory of extremes tell the clusters above a high level from those above a
    lower one: M. R. Leadbetter, "Extremes and local dependence in stationary sequences", 1983.)
    """
    yield 1.0
    for promised, times in (
        (tenant.slo.ttft_s, [columns.ttft_s for columns in runs]),
        (tenant.slo.tpot_s, [columns.tpot_s for columns in runs]),
    ):
        known = [each[~np.isnan(each)] for each in times]
        if promised is None or not sum(each.size for each in known):
            continue
        bound = max(float(np.quantile(np.concatenate(known), _NOT_SLOW)), _FAR_BELOW * promised)
        yield _variance_ratio(_batches([each <= bound for each in known]))


def _batches(runs: Sequence[NDArray[np.bool_]]) -> list[NDArray[np.bool_]]:
    """Stretches of each run, one after the other; none of a run that is too short."""
    return [
        batch
        for run in runs
        if run.size >= _FEWEST_BATCHES * _FEWEST_IN_A_BATCH
        for batch in np.array_split(run, min(_MOST_BATCHES, run.size // _FEWEST_IN_A_BATCH))
    ]


def _variance_ratio(batches: Sequence[NDArray[np.bool_]]) -> float:
    """How many times more the shares of batches vary than those of independent requests would; 0
    if there is nothing to tell it from."""
    if len(batches) < 2:
        return 0.0
    sizes = np.array([batch.size for batch in batches])
    counts = np.array([int(batch.sum()) for batch in batches])
    share = float(counts.sum() / sizes.sum())
    if not 0 < share < 1:
        return 0.0
    expected = float(sizes.mean()) * share * (1 - share)
    return float(np.sum((counts - sizes * share) ** 2)) / (len(batches) - 1) / expected


def _design_effect(kept: Sequence[NDArray[np.bool_]], confidence: float) -> float:
    """How many requests that depend on each other say as much as one that does not, by how their
    shares vary; 1 at least.

    (L. Kish, "Survey Sampling", 1965, for clusters; batches of a sequence in time as in A. M. Law,
    "Simulation Modeling and Analysis", on batch means. An interval of a share takes it as so many
    times fewer requests, and fewer still for its being known from a few batches only: E. L. Korn
    and B. I. Graubard, Survey Methodology 24, 1998.)
    """
    batches = _batches(kept)
    if len(batches) < 2:
        return 1.0
    t = student.quantile(confidence, len(batches) - 1)
    return max(_variance_ratio(batches) * t * t / _squared_z(confidence), 1.0)


def _needed(target: float, confidence: float) -> int:
    """The fewest requests, all of them kept, whose interval is at `target` or above: of n kept of
    n, Wilson's lower bound is n / (n + z²)."""
    return math.ceil(_squared_z(confidence) * target / (1 - target) - 1e-9)


def _squared_z(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2) ** 2
