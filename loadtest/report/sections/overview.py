"""The first thing that is read: what it came to, and the figures that say so."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.record import Outcome
from loadtest.report.blocks import Tile, lines, table, tiles
from loadtest.report.labels import Shown
from loadtest.report.markup import Html, element
from loadtest.report.promises import promise_bars, promise_of
from loadtest.report.quantities import (
    NONE,
    count,
    duration,
    per_second,
    percent,
    percent_range,
    target,
    usd,
)
from loadtest.report.words import Tone, Verdict
from loadtest.stats.distribution import Distribution
from loadtest.summary import Figures
from loadtest.tables import Table

_SIGNS = {Tone.GOOD: "✓", Tone.BAD: "✗", Tone.UNSURE: "?", Tone.PLAIN: "i"}
_SPOKEN = {
    Tone.GOOD: "Promises kept",
    Tone.BAD: "Promises broken",
    Tone.UNSURE: "Not certain",
    Tone.PLAIN: "Result",
}


def verdict_box(verdict: Verdict, warnings: Sequence[str]) -> Html:
    """The verdict, and below it what to beware of."""
    sign = element("span", _SIGNS[verdict.tone], class_="sign", aria_hidden="true")
    parts = [
        element(
            "p",
            sign,
            element("span", f"{_SPOKEN[verdict.tone]}: ", class_="spoken"),
            element("strong", verdict.headline),
        )
    ]
    if verdict.sentences:
        parts.append(lines(verdict.sentences))
    box = element("div", *parts, class_=f"verdict {verdict.tone.value}")
    if not warnings:
        return box
    beware = element("div", element("h3", "Beware"), lines(warnings), class_="warnings")
    return element("div", box, beware)


def key_figures(shown: Shown) -> Html:
    """The run in ten tiles at most; what is not known has none."""
    whole = shown.summary.whole
    failed = whole.requests - whole.outcomes.get(Outcome.OK, 0)
    found = [
        _attainment(shown),
        Tile("Goodput", per_second(whole.goodput_rps), _good(whole)),
        Tile("Answers", per_second(whole.requests_per_minute / 60), _sent(shown)),
        Tile("Output tokens", per_second(whole.output_tokens_per_s), "of whole answers"),
        _latency("Time to first token", whole.latencies.ttft_ms),
        _latency("Time per token after", whole.latencies.tpot_ms),
        _latency("Whole answer", whole.latencies.e2e_ms),
        Tile("From the cache", percent(whole.cache.all), "of prompt tokens"),
        _cost(whole),
        Tile("Failed", count(failed), f"of {count(whole.requests)} requests"),
    ]
    return tiles(tile for tile in found if tile.figure != NONE)


def runs_table(runs: Sequence[Shown]) -> Html:
    """One row per run, linked to its details."""
    headers = (
        "run", "sent", "kept promise", "goodput", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95",
        "output tokens", "from cache", "failed",
    )  # fmt: skip
    rows = []
    for each in runs:
        whole, times = each.summary.whole, each.summary.whole.latencies
        failed = whole.requests - whole.outcomes.get(Outcome.OK, 0)
        rows.append(
            (
                each.label,
                per_second(each.rate_rps),
                percent(whole.attainment),
                per_second(whole.goodput_rps),
                *(
                    duration(None if found is None else value)
                    for found in (times.ttft_ms, times.tpot_ms)
                    for value in ((found.p50, found.p95) if found else (None, None))
                ),
                per_second(whole.output_tokens_per_s),
                percent(whole.cache.all),
                count(failed),
            )
        )
    return table(Table(headers, tuple(rows)), "All runs", [each.key for each in runs])


def _attainment(shown: Shown) -> Tile:
    whole, bars = shown.summary.whole, promise_bars(shown.run, shown.summary)
    if whole.attainment is None or not bars:
        return Tile("Promises kept", NONE)
    remark = ""
    if whole.attainment_low is not None and whole.attainment_high is not None:
        remark = f"95 % interval {percent_range(whole.attainment_low, whole.attainment_high)}"
    targets = {bar.target for bar in bars}
    if len(targets) == 1:
        remark += f"; target {target(targets.pop())}"
    promises = {promise_of(tenant) for tenant in shown.run.tenants if tenant.slo.promises}
    if len(promises) == 1:
        remark += f" ({promises.pop()})"
    return Tile("Promises kept", percent(whole.attainment), remark)


def _latency(name: str, found: Distribution | None) -> Tile:
    if found is None:
        return Tile(name, NONE)
    return Tile(
        name, duration(found.p50), f"p50; p95 {duration(found.p95)}, p99 {duration(found.p99)}"
    )


def _good(whole: Figures) -> str:
    return "whole answers" if whole.attainment is None else "answers in time"


def _sent(shown: Shown) -> str:
    return f"{per_second(shown.rate_rps)} sent" if shown.rate_rps is not None else "answered whole"


def _cost(whole: Figures) -> Tile:
    cost = whole.cost
    if cost.machine_per_million_output is not None:
        charged = cost.charged_per_million_output
        remark = "per million output tokens, machine"
        if charged is not None:
            remark += f"; {usd(charged)} charged"
        return Tile("Cost", usd(cost.machine_per_million_output), remark)
    return Tile("Cost", usd(cost.charged_per_million_output), "per million output tokens, charged")
