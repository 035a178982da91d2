"""How it went over time: what was sent and answered, how long it took, what waited and failed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadtest.report.blocks import charts, group
from loadtest.report.charts.frame import Axis, no_chart
from loadtest.report.charts.lines import LineChart, Series
from loadtest.report.charts.marks import DASHES, dots
from loadtest.report.charts.scale import Scale, clock, fitting, from_zero
from loadtest.report.charts.stack import Layer, StackChart
from loadtest.report.labels import Shown
from loadtest.report.markup import Html
from loadtest.report.over_time import Steps, end_of, told
from loadtest.report.promises import limits_ms, promised_at
from loadtest.report.quantities import (
    counted,
    duration,
    figure,
    per_second,
    tick,
    tick_duration,
)

_MOST_DOTS = 700
_FAILURE_COLOURS = ("c-bad", "c-5", "c-4", "c-2", "c-6", "c-quiet")


def timelines(shown: Shown) -> Html:
    """Charts over the run's time."""
    end_s = end_of(shown.columns, shown.run.wall_s)
    steps, x = Steps.of(len(shown.columns), end_s), Axis(clock(end_s), seconds)
    return group(
        "How it went",
        charts(
            _requests(shown, steps, x),
            _first_tokens(shown, steps, x),
            _load(shown, steps, x),
            _tokens(shown, steps, x),
            _failures(shown, steps, x),
        ),
        intro=f"Time runs from the first sending; each step is {duration(steps.width_s * 1e3)}.",
    )


def seconds(at_s: float) -> str:
    """A moment of the run, for an axis."""
    return tick_duration(at_s * 1e3)


def _requests(shown: Shown, steps: Steps, x: Axis) -> Html:
    columns = shown.columns
    sent = steps.rate(columns.sent_s)
    answered = steps.rate(columns.ended_s[columns.ok])
    failed = steps.rate(columns.ended_s[~columns.ok])
    series = [
        Series("sent", _over(steps, sent), "c-quiet"),
        Series("answered", _over(steps, answered), "c-1"),
    ]
    if any(failed):
        series.append(Series("failed", _over(steps, failed), "c-bad", DASHES[1]))
    return LineChart(
        "Requests",
        "per second, by the time of sending and of the end",
        f"Sent at most {per_second(max(sent))}, answered at most {per_second(max(answered))}.",
        x,
        Axis(from_zero(sent + answered + failed), tick, "requests/s"),
        series,
        told=[
            (
                middle,
                f"{seconds(middle)}: sent {per_second(a)}, answered {per_second(b)}, failed "
                f"{per_second(c)}",
            )
            for middle, a, b, c in zip(steps.middles, sent, answered, failed, strict=True)
        ],
    ).html()


def _first_tokens(shown: Shown, steps: Steps, x: Axis) -> Html:
    title = "Time to first token"
    columns = shown.columns
    answered = np.flatnonzero(columns.ok & ~np.isnan(columns.first_s))
    if not answered.size:
        return no_chart(title, "No answer had a first token.")
    at_s, took_ms = columns.sent_s[answered], columns.ttft_s[answered] * 1e3
    p50, p95 = steps.percentiles(at_s, took_ms, 0.5, 0.95)
    promised_ms = limits_ms(tenant.slo.ttft_s for tenant in shown.run.tenants)
    y: Scale = fitting([float(took_ms.min()), float(took_ms.max()), *promised_ms])
    chart = LineChart(
        title,
        "by the time of sending; band from p50 to p95, a dot is an answer",
        f"p50 between {duration(np.nanmin(p50))} and {duration(np.nanmax(p50))}, p95 at most "
        f"{duration(np.nanmax(p95))}.",
        x,
        Axis(y, tick_duration),
        [
            Series("p50", _over(steps, p50), "c-1"),
            Series("p95", _over(steps, p95), "c-1", DASHES[1]),
        ],
        band=list(zip(steps.middles, p50, p95, strict=True)),
        across=promised_at(promised_ms),
        told=[
            (middle, f"{seconds(middle)}: p50 {duration(a)}, p95 {duration(b)}")
            for middle, a, b in zip(steps.middles, p50, p95, strict=True)
            if a == a
        ],
    )
    every = -(-len(answered) // _MOST_DOTS)
    points = zip(at_s[::every].tolist(), took_ms[::every].tolist(), strict=True)
    return chart.html_over(dots(chart.frame(), points, "c-1 faint"))


def _load(shown: Shown, steps: Steps, x: Axis) -> Html:
    running, waiting = told(shown.run.timeline, "running"), told(shown.run.timeline, "waiting")
    if not running and not waiting:
        still_open = steps.unanswered(shown.columns)
        return LineChart(
            "Open requests",
            "sent and not ended; the server did not tell what ran and what waited",
            f"At most {figure(max(still_open))}.",
            x,
            Axis(from_zero(still_open), tick, "requests"),
            [Series("open", _over(steps, still_open), "c-1")],
            told=[
                (middle, f"{seconds(middle)}: {counted(round(number), 'request')} open")
                for middle, number in zip(steps.middles, still_open, strict=True)
            ],
        ).html()
    series = [
        Series(name, points, colour, dash)
        for name, points, colour, dash in (
            ("running", running, "c-1", None),
            ("waiting", waiting, "c-2", DASHES[1]),
        )
        if points
    ]
    peaks = [f"{each.label} at most {figure(max(y for _, y in each.points))}" for each in series]
    return LineChart(
        "At the server",
        "requests that ran and that waited, as it said",
        f"{', '.join(peaks)}.",
        x,
        Axis(from_zero(y for each in series for _, y in each.points), tick, "requests"),
        series,
        told=_told_together(series),
    ).html()


def _tokens(shown: Shown, steps: Steps, x: Axis) -> Html:
    rate = steps.output_rate(shown.columns)
    return LineChart(
        "Output tokens",
        "per second, spread evenly over each answer",
        f"At most {per_second(max(rate))}.",
        x,
        Axis(from_zero(rate), tick, "tokens/s"),
        [Series("tokens", _over(steps, rate), "c-3")],
        told=[
            (middle, f"{seconds(middle)}: {per_second(value)}")
            for middle, value in zip(steps.middles, rate, strict=True)
        ],
    ).html()


def _failures(shown: Shown, steps: Steps, x: Axis) -> Html:
    title = "Failed requests"
    failures = steps.failures(shown.columns)
    if not failures:
        return no_chart(title, "None: every request was answered as asked.")
    totals = [sum(step) for step in zip(*failures.values(), strict=True)]
    return StackChart(
        title,
        "in each step, by kind and the time of the end",
        ", ".join(f"{figure(sum(n))} {kind.value}" for kind, n in failures.items()) + ".",
        x,
        Axis(from_zero(totals), tick, "requests"),
        steps.edges.tolist(),
        [
            Layer(kind.value, numbers, _FAILURE_COLOURS[at % len(_FAILURE_COLOURS)])
            for at, (kind, numbers) in enumerate(failures.items())
        ],
        told=[
            (middle, f"{seconds(middle)}: {counted(round(number), 'failed request')}")
            for middle, number in zip(steps.middles, totals, strict=True)
            if number
        ],
    ).html()


def _over(steps: Steps, values: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(steps.middles, values, strict=True))


def _told_together(series: Sequence[Series]) -> list[tuple[float, str]]:
    """What every series has at each moment, where all of them were told together."""
    words: dict[float, list[str]] = {}
    for each in series:
        for at_s, value in each.points:
            words.setdefault(at_s, []).append(f"{figure(value)} {each.label}")
    return [(at_s, f"{seconds(at_s)}: {', '.join(words[at_s])}") for at_s in sorted(words)]
