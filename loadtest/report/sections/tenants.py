"""Whether each tenant had what was promised to it."""

from __future__ import annotations

from loadtest.record import Outcome
from loadtest.report.blocks import charts, group, table
from loadtest.report.charts.bars import share_bars
from loadtest.report.labels import Shown
from loadtest.report.markup import Html
from loadtest.report.promises import promise_bars, promise_of
from loadtest.report.quantities import count, duration, per_second, percent, percent_range, target
from loadtest.summary import Figures
from loadtest.tables import Table

_MOST_BARS = 30


def tenants(shown: Shown) -> Html:
    """A bar for each tenant with a promise, furthest below its target first, and the table of
    all."""
    bars = sorted(promise_bars(shown.run, shown.summary), key=lambda bar: bar.share - bar.target)
    drawn = bars[:_MOST_BARS]
    parts = []
    if drawn:
        subtitle = "bar: share; line through it: 95 % interval; upright stroke: target"
        if len(drawn) < len(bars):
            subtitle += f"; the {len(drawn)} of {len(bars)} that are worst off"
        spoken = "; ".join(f"{bar.label} {percent(bar.share)}, {bar.word}" for bar in drawn)
        parts.append(charts(share_bars("Promises kept", subtitle, f"{spoken}.", drawn)))
    return group("Tenants and their promises", *parts, _table(shown))


def _table(shown: Shown) -> Html:
    plans = {tenant.name: tenant for tenant in shown.run.tenants}
    rows = []
    for name, found in shown.summary.by_tenant.items():
        plan = plans.get(name)
        rows.append(
            (
                name,
                plan.service_class.value if plan else "–",
                f"{promise_of(plan)} for {target(plan.slo.target)}"
                if plan and plan.slo.promises
                else "none",
                count(found.requests),
                _kept(found),
                per_second(found.goodput_rps),
                *_times(found),
                percent(found.cache.all),
                count(found.requests - found.outcomes.get(Outcome.OK, 0)),
            )
        )
    headers = (
        *("tenant", "class", "promise", "requests", "kept (95 % interval)", "goodput"),
        *("TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "from cache", "failed"),
    )
    return table(Table(headers, tuple(rows)), "By tenant")


def _kept(found: Figures) -> str:
    if found.attainment is None or found.attainment_low is None or found.attainment_high is None:
        return percent(found.attainment)
    interval = percent_range(found.attainment_low, found.attainment_high)
    return f"{percent(found.attainment)} ({interval})"


def _times(found: Figures) -> list[str]:
    return [
        duration(value)
        for each in (found.latencies.ttft_ms, found.latencies.tpot_ms)
        for value in ((each.p50, each.p95) if each else (None, None))
    ]
