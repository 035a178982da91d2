"""Latency, kept promises and goodput against the rate, and the rate up to which they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from loadtest.find_max import FoundMax
from loadtest.plan import TenantPlan
from loadtest.report.blocks import charts, section, table
from loadtest.report.charts.frame import Axis, no_chart
from loadtest.report.charts.lines import LineChart, Series
from loadtest.report.charts.marks import DASHES, Reference
from loadtest.report.charts.scale import Linear, fitting, from_zero, linear
from loadtest.report.labels import COLOURS, Shown
from loadtest.report.markup import Html
from loadtest.report.promises import limits_ms, promised_at
from loadtest.report.quantities import (
    duration,
    per_second,
    percent,
    percent_range,
    target,
    tick,
    tick_duration,
    tick_percent,
)
from loadtest.report.words import Tone, Verdict
from loadtest.stats.distribution import Distribution
from loadtest.summary import Figures

_INTRO = "As the rate grows, waiting sets in: latency bends upwards and promises are broken."

Distributed = Callable[[Figures], Distribution | None]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured at a rate, for one server or setting."""

    name: str
    rate_rps: float
    figures: Figures
    kept: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Edges:
    """The largest rate up to which promises hold, and the smallest at which they do not; None where
    there is none. `shown`: by intervals, not just by what was seen."""

    holds_rps: float | None = None
    fails_rps: float | None = None
    shown: bool = False

    def marks(self) -> list[Reference]:
        """Both as a chart has them."""
        words = ("holds at", "fails at") if self.shown else ("kept at", "missed at")
        named = zip(words, (self.holds_rps, self.fails_rps), strict=True)
        return [Reference(at, f"{word} {per_second(at)}") for word, at in named if at is not None]


def found_verdict(found: FoundMax) -> Verdict:
    """The rate that holds, and what there is to say beside it."""
    first, *others = (f"{line[:1].upper()}{line[1:]}." for line in found.lines())
    return Verdict(Tone.UNSURE if found.rate is None else Tone.GOOD, first, tuple(others))


def found_section(found: FoundMax) -> Html:
    """What a search for the largest rate measured, with the rate it found."""
    points = [
        Measured("kept", each.rate, each.figures, each.worst.share, each.worst.low, each.worst.high)
        for each in found.points
    ]
    edges = Edges(found.rate, found.fails.rate if found.fails else None, shown=True)
    intro = _INTRO
    if len(found.points) and len(found.points[0].attainments) > 1:
        intro += " Promises kept are those of the tenant that is furthest below its target."
    return section(
        "Against the rate",
        *([_all_charts(points, found.tenants, edges)] if points else []),
        table(found.table(), "All rates that were measured"),
        key="rates",
        intro=intro,
    )


def sweep_section(runs: Sequence[Shown]) -> Html:
    """What runs at several rates say together."""
    points = [
        Measured(
            each.run.name,
            each.rate_rps,
            each.summary.whole,
            each.summary.whole.attainment,
            each.summary.whole.attainment_low,
            each.summary.whole.attainment_high,
        )
        for each in runs
        if each.rate_rps is not None
    ]
    points.sort(key=lambda each: each.rate_rps)
    tenants = list(dict.fromkeys(tenant for each in runs for tenant in each.run.tenants))
    return section(
        "Against the rate",
        _all_charts(points, tenants, _edges(points, tenants)),
        key="rates",
        intro=_INTRO,
    )


def _edges(points: Sequence[Measured], tenants: Sequence[TenantPlan]) -> Edges:
    """Where points in the order of their rates go below the target: known only of one server, and
    if there is one target."""
    targets = {tenant.slo.target for tenant in tenants if tenant.slo.promises}
    if len(targets) != 1 or len({each.name for each in points}) != 1:
        return Edges()
    holds_rps = None
    for each in points:
        if each.kept is not None and each.kept < min(targets):
            return Edges(holds_rps, each.rate_rps)
        holds_rps = each.rate_rps
    return Edges(holds_rps, None)


def _all_charts(points: Sequence[Measured], tenants: Sequence[TenantPlan], edges: Edges) -> Html:
    upright = edges.marks()
    x = Axis(_rates(points), tick)
    ttft_ms = limits_ms(tenant.slo.ttft_s for tenant in tenants)
    tpot_ms = limits_ms(tenant.slo.tpot_s for tenant in tenants)
    figures = [
        _latency("Time to first token", _ttft, points, x, ttft_ms, upright),
        _latency("Time per output token", _tpot, points, x, tpot_ms, upright),
        _goodput(points, x, upright),
    ]
    if any(each.kept is not None for each in points):
        figures.insert(0, _attainment(points, tenants, x, upright))
    return charts(*figures)


def _rates(points: Sequence[Measured]) -> Linear:
    return from_zero((each.rate_rps for each in points), ticks=6)


def _attainment(
    points: Sequence[Measured],
    tenants: Sequence[TenantPlan],
    x: Axis,
    upright: Sequence[Reference],
) -> Html:
    by_name = _by_name(points)
    shares = [each.kept for each in points if each.kept is not None]
    lowest = min(0.9, *shares, *(each.low for each in points if each.low is not None))
    targets = {tenant.slo.target for tenant in tenants if tenant.slo.promises}
    return LineChart(
        "Promises kept",
        "share of requests, over the requests/s that were sent",
        "; ".join(map(_spoken_share, points)) + ".",
        x,
        Axis(linear(math.floor(lowest * 20) / 20, 1.0), tick_percent),
        [
            Series(
                name,
                _line(found, lambda each: each.kept),
                COLOURS[at % len(COLOURS)],
                DASHES[at % len(DASHES)],
                dotted=True,
            )
            for at, (name, found) in enumerate(by_name.items())
        ],
        band=_intervals(points),
        across=[Reference(each, f"target {target(each)}", promised=True) for each in targets],
        upright=upright,
        told=[(each.rate_rps, _spoken_share(each)) for each in points],
    ).html()


def _latency(
    title: str,
    of: Distributed,
    points: Sequence[Measured],
    x: Axis,
    promised_ms: list[float],
    upright: Sequence[Reference],
) -> Html:
    def p50(figures: Figures) -> float | None:
        return found.p50 if (found := of(figures)) else None

    def p95(figures: Figures) -> float | None:
        return found.p95 if (found := of(figures)) else None

    by_name = _by_name(points)
    series = []
    for at, (name, measured) in enumerate(by_name.items()):
        colour, dash = COLOURS[at % len(COLOURS)], DASHES[at % len(DASHES)]
        if len(by_name) == 1:
            series.append(
                Series("p50", _line(measured, lambda each: p50(each.figures)), colour, dotted=True)
            )
            series.append(
                Series(
                    "p95",
                    _line(measured, lambda each: p95(each.figures)),
                    colour,
                    DASHES[1],
                    dotted=True,
                )
            )
        else:
            series.append(
                Series(
                    name, _line(measured, lambda each: p95(each.figures)), colour, dash, dotted=True
                )
            )
    values = [y for each in series for _, y in each.points if y == y]
    if not values:
        return no_chart(title, "Not known: no answer had any.")
    spoken = [
        (
            each.rate_rps,
            f"{_at(each)}: p50 {duration(p50(each.figures))}, p95 {duration(p95(each.figures))}",
        )
        for each in points
    ]
    return LineChart(
        title,
        f"{'p50 and p95' if len(by_name) == 1 else 'p95'}, over the requests/s that were sent",
        "; ".join(words for _, words in spoken) + ".",
        x,
        Axis(fitting([*values, *promised_ms]), tick_duration),
        series,
        across=promised_at(promised_ms),
        upright=upright,
        told=spoken,
    ).html()


def _goodput(points: Sequence[Measured], x: Axis, upright: Sequence[Reference]) -> Html:
    by_name = _by_name(points)
    highest = max(each.rate_rps for each in points)
    spoken = [
        (each.rate_rps, f"{_at(each)}: goodput {per_second(each.figures.goodput_rps)}")
        for each in points
    ]
    ideal = Series("all in time", [(0.0, 0.0), (highest, highest)], "c-quiet", DASHES[2])
    found = [
        Series(
            name if len(by_name) > 1 else "goodput",
            _line(measured, lambda each: each.figures.goodput_rps),
            COLOURS[at % len(COLOURS)],
            DASHES[at % len(DASHES)],
            dotted=True,
        )
        for at, (name, measured) in enumerate(by_name.items())
    ]
    return LineChart(
        "Goodput",
        "answers in time per second, over the requests/s that were sent",
        "; ".join(words for _, words in spoken) + ".",
        x,
        Axis(from_zero([highest]), tick, "answers/s"),
        [ideal, *found],
        upright=upright,
        told=spoken,
    ).html()


def _intervals(points: Sequence[Measured]) -> list[tuple[float, float, float]]:
    """Those of one server that was measured once at each rate; none of others, which would cover
    each other."""
    if len({each.name for each in points}) > 1:
        return []
    found = [
        (each.rate_rps, each.low, each.high)
        for each in points
        if each.low is not None and each.high is not None
    ]
    return found if len({rate for rate, _, _ in found}) == len(found) else []


def _by_name(points: Sequence[Measured]) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {}
    for each in points:
        found.setdefault(each.name, []).append(each)
    return found


def _line(
    measured: Sequence[Measured], of: Callable[[Measured], float | None]
) -> list[tuple[float, float]]:
    """A point for each rate; what was measured at one rate several times is averaged."""
    by_rate: dict[float, list[float]] = {}
    for each in measured:
        value = of(each)
        if value is not None:
            by_rate.setdefault(each.rate_rps, []).append(value)
    return [(rate, fmean(values)) for rate, values in sorted(by_rate.items())]


def _at(each: Measured) -> str:
    return f"{each.name} at {per_second(each.rate_rps)}"


def _spoken_share(each: Measured) -> str:
    words = f"{_at(each)}: {percent(each.kept)} kept"
    if each.low is not None and each.high is not None:
        words += f" (95 % interval {percent_range(each.low, each.high)})"
    return words


def _ttft(figures: Figures) -> Distribution | None:
    return figures.latencies.ttft_ms


def _tpot(figures: Figures) -> Distribution | None:
    return figures.latencies.tpot_ms
