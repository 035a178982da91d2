"""Where prompts came from: the tiers over time, and what each held."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.record import Run
from loadtest.report.blocks import charts, group
from loadtest.report.cache_over_time import TierShares, tier_shares
from loadtest.report.charts.frame import Axis, no_chart
from loadtest.report.charts.lines import LineChart, Series
from loadtest.report.charts.marks import DASHES
from loadtest.report.charts.scale import clock, from_zero, linear
from loadtest.report.charts.stack import Layer, StackChart
from loadtest.report.labels import Shown
from loadtest.report.markup import Html
from loadtest.report.over_time import Steps, end_of, told
from loadtest.report.quantities import percent, size, tick, tick_percent
from loadtest.report.sections.timeline import seconds

_TITLE = "Prompt tokens by tier"


def cache_tiers(shown: Shown) -> Html:
    """The share of the prompt tokens that each tier had, and the tiers' sizes where they are
    known."""
    end_s = end_of(shown.columns, shown.run.wall_s)
    x = Axis(clock(end_s), seconds)
    steps = Steps.of(len(shown.columns), end_s)
    found = tier_shares(shown.run.timeline, shown.columns, steps)
    if found is None:
        why = "the server does not say what came from its cache"
        if not shown.columns.ok.any():
            why = "no request was answered whole"
        first = no_chart(_TITLE, f"Not known: {why}.")
    else:
        first = _shares(found, x)
    return group("What the cache gave", charts(first, *_sizes(shown.run, x)))


def _shares(found: TierShares, x: Axis) -> Html:
    middles = [(a + b) / 2 for a, b in zip(found.edges, found.edges[1:], strict=False)]
    cached = [sum(step) for step in zip(*found.shares.values(), strict=True)]
    layers = [Layer(tier.label, shares, tier.colour) for tier, shares in found.shares.items()]
    computed = [1.0 - share for share in cached]
    return StackChart(
        _TITLE,
        f"share from each tier; the rest was computed ({found.source})",
        "; ".join(f"{each.label} at most {percent(_most(each.values))}" for each in layers) + ".",
        x,
        Axis(linear(0, 1), tick_percent),
        found.edges,
        [*layers, Layer("computed", computed, "c-computed")],
        told=[
            (middle, f"{seconds(middle)}: " + _step_words(found, at))
            for at, middle in enumerate(middles)
            if cached[at] == cached[at]
        ],
    ).html()


def _sizes(run: Run, x: Axis) -> list[Html]:
    series = [
        Series(name, points, colour, dash)
        for name, field, colour, dash in (
            ("device", "device_bytes", "c-device", DASHES[0]),
            ("DRAM", "dram_bytes", "c-dram", DASHES[1]),
            ("Redis", "redis_bytes", "c-redis", DASHES[2]),
        )
        if (points := told(run.timeline, field))
    ]
    if not series:
        return []
    largest = max(y for each in series for _, y in each.points)
    unit, name = next(
        (n, name)
        for n, name in (
            (2**40, "TiB"),
            (2**30, "GiB"),
            (2**20, "MiB"),
            (2**10, "KiB"),
            (1, "bytes"),
        )
        if largest >= n or n == 1
    )
    scaled = [
        Series(each.label, [(at, y / unit) for at, y in each.points], each.colour, each.dash)
        for each in series
    ]
    return [
        LineChart(
            "Held in each tier",
            "as the server told",
            "; ".join(f"{each.label} at the end {size(each.points[-1][1])}" for each in series)
            + ".",
            x,
            Axis(from_zero(y for each in scaled for _, y in each.points), tick, name),
            scaled,
        ).html()
    ]


def _most(values: Sequence[float]) -> float:
    return max((value for value in values if value == value), default=0.0)


def _step_words(found: TierShares, at: int) -> str:
    return ", ".join(f"{tier.label} {percent(each[at])}" for tier, each in found.shares.items())
