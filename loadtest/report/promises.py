"""What tenants were promised and had: as bars, as words, and as marks in charts."""

from __future__ import annotations

from collections.abc import Iterable

from loadtest.plan import TenantPlan
from loadtest.record import Run
from loadtest.report.charts.bars import ShareBar
from loadtest.report.charts.marks import Reference
from loadtest.report.quantities import tick_duration
from loadtest.summary import Summary

_MOST_LIMITS = 3


def promise_bars(run: Run, summary: Summary) -> list[ShareBar]:
    """Of each tenant that was promised something, the share of requests that kept it."""
    bars = []
    for tenant in run.tenants:
        found = summary.by_tenant.get(tenant.name)
        if found is None or not tenant.slo.promises or found.attainment is None:
            continue
        low = found.attainment if found.attainment_low is None else found.attainment_low
        high = found.attainment if found.attainment_high is None else found.attainment_high
        bars.append(ShareBar(tenant.name, found.attainment, low, high, tenant.slo.target))
    return bars


def promise_of(tenant: TenantPlan) -> str:
    """`TTFT ≤ 500 ms, TPOT ≤ 120 ms`; an en dash for none."""
    terms = [
        f"{name} ≤ {tick_duration(limit_s * 1e3)}"
        for name, limit_s in (("TTFT", tenant.slo.ttft_s), ("TPOT", tenant.slo.tpot_s))
        if limit_s is not None
    ]
    return ", ".join(terms) or "–"


def common_limit_ms(limits_s: Iterable[float | None]) -> float | None:
    """The limit that all who have one share, in milliseconds; None if there is no such."""
    distinct = {limit_s for limit_s in limits_s if limit_s is not None}
    return distinct.pop() * 1e3 if len(distinct) == 1 else None


def limits_ms(limits_s: Iterable[float | None]) -> list[float]:
    """The distinct limits in milliseconds, the tightest first, for a chart: none if there are more
    than three, which would hide what they limit."""
    distinct = sorted({limit_s * 1e3 for limit_s in limits_s if limit_s is not None})
    return distinct if len(distinct) <= _MOST_LIMITS else []


def promised_at(promised_ms: Iterable[float]) -> list[Reference]:
    """Limits as a chart marks them."""
    return [
        Reference(each, f"promised {tick_duration(each)}", promised=True) for each in promised_ms
    ]
