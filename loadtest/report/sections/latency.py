"""How long it took: the distributions of a run, and those of several runs over each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from loadtest.columns import Columns, Floats
from loadtest.report.blocks import charts, group, table
from loadtest.report.charts.frame import Axis, no_chart
from loadtest.report.charts.histogram import Histogram, shares_up_to
from loadtest.report.charts.lines import LineChart, Series
from loadtest.report.charts.marks import DASHES, Reference
from loadtest.report.charts.scale import fitting, linear
from loadtest.report.labels import COLOURS, Shown, is_sweep
from loadtest.report.markup import Html
from loadtest.report.promises import limits_ms, promised_at
from loadtest.report.quantities import count, duration, percent, tick_duration, tick_percent
from loadtest.stats.distribution import Distribution
from loadtest.summary import Figures
from loadtest.tables import Table

_MOST_VALUES = 200_000
"""More change no pixel of a chart."""
_MOST_OVERLAID = 8


def distributions(shown: Shown) -> Html:
    """Histograms of all four times with their percentiles, the promise where there is one, and the
    table of all percentiles."""
    answers = shown.columns.take(np.flatnonzero(shown.columns.ok))
    times, tenants = shown.summary.whole.latencies, shown.run.tenants
    figures = [
        _histogram(
            "Time to first token", answers.ttft_s, times.ttft_ms,
            limits_ms(tenant.slo.ttft_s for tenant in tenants),
        ),
        _histogram(
            "Time per output token", answers.tpot_s, times.tpot_ms,
            limits_ms(tenant.slo.tpot_s for tenant in tenants),
        ),
        _histogram("Between tokens", answers.gaps_s, times.inter_token_ms, []),
        _histogram("Whole answer", answers.e2e_s, times.e2e_ms, []),
    ]  # fmt: skip
    return group(
        "How long answers took",
        charts(*figures),
        _percentile_table(shown.summary.whole),
        *_labels_table(shown),
        intro="Whole answers only. Upright lines are percentiles: p95 is the time within which 95 "
        "of 100 answers came.",
    )


def overlays(runs: Sequence[Shown]) -> Html:
    """The share of answers that came within a time, a line for each run; repeated ones of a name
    have one line together."""
    by_label: dict[str, list[Columns]] = {}
    for each in runs:
        label = each.label if is_sweep(runs) else each.run.name
        by_label.setdefault(label, []).append(each.columns)
    some = dict(list(by_label.items())[:_MOST_OVERLAID])
    intro = "The higher a line at a time, the more of the answers had come by then."
    if len(some) < len(by_label):
        intro += f" Only the first {len(some)} of {len(by_label)} are drawn."
    slos = [tenant.slo for each in runs for tenant in each.run.tenants]
    return group(
        "How long answers took",
        charts(
            _overlay("Time to first token", some, _ttft_s, limits_ms(slo.ttft_s for slo in slos)),
            _overlay("Time per output token", some, _tpot_s, limits_ms(slo.tpot_s for slo in slos)),
            _overlay("Whole answer", some, _e2e_s, []),
        ),
        intro=intro,
    )


def _histogram(
    title: str, values_s: Floats, found: Distribution | None, promised_ms: list[float]
) -> Html:
    values_ms = _known_ms(values_s)
    if found is None or not values_ms.size:
        return no_chart(title, "Not known: no answer had any.")
    upright = [
        Reference(found.p50, f"p50 {duration(found.p50)}"),
        Reference(found.p95, f"p95 {duration(found.p95)}"),
        Reference(found.p99, f"p99 {duration(found.p99)}"),
    ]
    upright += promised_at(promised_ms)
    return Histogram(
        title,
        f"{count(found.count)} values, mean {duration(found.mean)}",
        f"Histogram. {', '.join(each.label for each in upright)}.",
        values_ms,
        duration,
        tick_duration,
        "c-1",
        upright,
    ).html()


def _overlay(
    title: str,
    by_label: Mapping[str, Sequence[Columns]],
    times_s: Callable[[Columns], Floats],
    promised_ms: list[float],
) -> Html:
    series = []
    for number, (label, runs) in enumerate(by_label.items()):
        values = _known_ms(np.concatenate([times_s(each)[each.ok] for each in runs]))
        if values.size:
            dash = DASHES[number // len(COLOURS) + number % 2]
            series.append(Series(label, shares_up_to(values), COLOURS[number % len(COLOURS)], dash))
    if not series:
        return no_chart(title, "Not known: no answer had any.")
    ends = [x for each in series for x, _ in (each.points[0], each.points[-1])]
    return LineChart(
        title,
        "share of answers within a time",
        "Cumulative shares of " + ", ".join(each.label for each in series) + ".",
        Axis(fitting([*ends, *promised_ms]), tick_duration),
        Axis(linear(0, 1), tick_percent),
        series,
        upright=promised_at(promised_ms),
    ).html()


def _percentile_table(whole: Figures) -> Html:
    times = whole.latencies
    named = {
        "time to first token": times.ttft_ms,
        "time to publish": times.time_to_publish_ms,
        "time per output token": times.tpot_ms,
        "between tokens": times.inter_token_ms,
        "whole answer": times.e2e_ms,
    }
    rows = tuple(
        (name, *map(duration, (each.mean, each.p50, each.p90, each.p95, each.p99, each.max)))
        for name, each in named.items()
        if each is not None
    )
    return table(
        Table(("time", "mean", "p50", "p90", "p95", "p99", "longest"), rows),
        "Percentiles of whole answers",
    )


def _labels_table(shown: Shown) -> list[Html]:
    if len(shown.summary.by_label) < 2:
        return []
    rows = tuple(
        (
            label,
            count(found.requests),
            *_spread(found.latencies.ttft_ms),
            *_spread(found.latencies.tpot_ms),
            *_spread(found.latencies.e2e_ms),
            percent(found.cache.all),
        )
        for label, found in shown.summary.by_label.items()
    )
    headers = (
        *("kind of request", "requests", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95"),
        *("whole p50", "whole p95", "from cache"),
    )
    return [table(Table(headers, rows), "By kind of request")]


def _spread(found: Distribution | None) -> tuple[str, str]:
    return (duration(found.p50), duration(found.p95)) if found else (duration(None), duration(None))


def _known_ms(values_s: Floats) -> Floats:
    known = values_s[~np.isnan(values_s)]
    every = max(1, -(-len(known) // _MOST_VALUES))
    # In order, so that what is left out is as spread as what stays.
    return np.sort(known)[::every] * 1e3


def _ttft_s(columns: Columns) -> Floats:
    return columns.ttft_s


def _tpot_s(columns: Columns) -> Floats:
    return columns.tpot_s


def _e2e_s(columns: Columns) -> Floats:
    return columns.e2e_s
