"""Goodput: not how much a server answers, but how much of it as was promised."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadtest.columns import Columns
from loadtest.plan import TenantPlan
from loadtest.stats.interval import Interval, wilson
from policies.slo import NO_SLO, Slo


class Goodput(NamedTuple):
    """`kept` requests were answered as promised, or whole where nothing was promised. `attainment`
    is the share of those that were sent to somebody with a promise, refused and failed ones
    included, whose promise was kept, and `interval` where the true share lies with a confidence of
    95 %; None without a promise."""

    kept: int
    attainment: float | None
    interval: Interval | None

    @classmethod
    def of(cls, columns: Columns, tenants: Iterable[TenantPlan]) -> Goodput:
        """Of these records. A tenant that is not among `tenants` was promised nothing."""
        promised = _promised(columns, tenants)
        kept = _kept(columns, promised)
        with_promise = np.array([slo.promises for slo in promised], np.bool_)[columns.tenant.codes]
        trials = int(with_promise.sum())
        if not trials:
            return cls(int(kept.sum()), None, None)
        successes = int((kept & with_promise).sum())
        return cls(int(kept.sum()), successes / trials, wilson(successes, trials))


def kept_rows(columns: Columns, tenants: Iterable[TenantPlan]) -> NDArray[np.bool_]:
    """Which of these records were answered as promised, or whole where nothing was promised. A
    tenant that is not among `tenants` was promised nothing."""
    return _kept(columns, _promised(columns, tenants))


def _promised(columns: Columns, tenants: Iterable[TenantPlan]) -> list[Slo]:
    """What was promised to each of the tenants that the records name."""
    slos = {tenant.name: tenant.slo for tenant in tenants}
    return [slos.get(name, NO_SLO) for name in columns.tenant.names]


def _kept(columns: Columns, promised: list[Slo]) -> NDArray[np.bool_]:
    """`Record.kept` of each row, without making records; for no promise, `Record.ok`."""
    # What was not promised is no limit. A comparison with NaN is False: a TPOT that never came to
    # be is not too long, but a first token that never came is not in time either.
    ttft_limits = np.array([_limit(slo.ttft_s) for slo in promised])[columns.tenant.codes]
    tpot_limits = np.array([_limit(slo.tpot_s) for slo in promised])[columns.tenant.codes]
    free = np.array([not slo.promises for slo in promised], np.bool_)[columns.tenant.codes]
    in_time = (columns.ttft_s <= ttft_limits) & ~(columns.tpot_s > tpot_limits)
    kept: NDArray[np.bool_] = columns.ok & (free | in_time)
    return kept


def _limit(target_s: float | None) -> float:
    return np.inf if target_s is None else target_s
