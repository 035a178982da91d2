"""What a run came to, in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from loadtest.columns import Columns
from loadtest.plan import TenantPlan
from loadtest.record import Outcome, Run
from loadtest.report.charts.bars import ShareBar
from loadtest.report.promises import common_limit_ms, promise_bars
from loadtest.report.quantities import (
    count,
    counted,
    duration,
    figure,
    percent,
    percent_range,
    target,
    tick_duration,
    usd,
)
from loadtest.stats.backlog import Backlog, falls_behind
from loadtest.summary import Figures, Summary

_MOST_NAMES = 3


class Tone(StrEnum):
    """How good it is, as far as a promise says what good is."""

    GOOD = "good"
    BAD = "bad"
    UNSURE = "unsure"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line that says it all, and sentences with the reasons."""

    tone: Tone
    headline: str
    sentences: tuple[str, ...] = ()


def verdict(run: Run, summary: Summary, columns: Columns) -> Verdict:
    """What came of the run."""
    whole = summary.whole
    if not whole.requests:
        return Verdict(Tone.BAD, "Nothing was sent.")
    answered = whole.outcomes.get(Outcome.OK, 0)
    if not answered:
        return Verdict(Tone.BAD, f"None of {counted(whole.requests, 'request')} was answered.")
    tone, headline = _promises_kept(run, summary) or (
        Tone.PLAIN,
        f"{_answered(answered, whole.requests)}; nothing was promised of their times.",
    )
    sentences = [
        _latency(whole, run.tenants),
        _throughput(whole),
        _queue(run, columns),
        _cache(whole),
        _cost(whole, run.usd_per_hour),
    ]
    return Verdict(tone, headline, tuple(each for each in sentences if each))


def _answered(answered: int, requests: int) -> str:
    if answered == requests:
        return f"All {counted(requests, 'request')} were answered as asked"
    return (
        f"{count(answered)} of {counted(requests, 'request')} ({percent(answered / requests)}) "
        "were answered as asked"
    )


def _promises_kept(run: Run, summary: Summary) -> tuple[Tone, str] | None:
    bars, attainment = promise_bars(run, summary), summary.whole.attainment
    if not bars or attainment is None:
        return None
    tone = _tone(bars)
    if len(bars) > 1 and any(bar.share < bar.target for bar in bars):
        return tone, _missed(bars)
    promised = sum(summary.by_tenant[bar.label].requests for bar in bars)
    line = f"{percent(attainment)} of {counted(promised, 'request')} kept their promise"
    if len(bars) > 1:
        line += f", and each of {len(bars)} tenants reached its target"
        close = [bar.label for bar in bars if bar.low < bar.target]
        return tone, f"{line}{f'; too close to call for {_few(close)}' if close else ''}."
    line += f" (target {target(bars[0].target)})"
    if tone is Tone.UNSURE:
        interval = percent_range(bars[0].low, bars[0].high)
        line += f": too close to call, the true share is within {interval}"
    return tone, f"{line}."


def _tone(bars: Sequence[ShareBar]) -> Tone:
    """Bad if one surely missed its target, good if all surely reached theirs."""
    if any(bar.high < bar.target for bar in bars):
        return Tone.BAD
    return Tone.GOOD if all(bar.low >= bar.target for bar in bars) else Tone.UNSURE


def _missed(bars: Sequence[ShareBar]) -> str:
    missed = [bar for bar in bars if bar.share < bar.target]
    missed.sort(key=lambda bar: bar.share - bar.target)
    names = [f"{bar.label} {percent(bar.share)} (target {target(bar.target)})" for bar in missed]
    kept = len(bars) - len(missed)
    return f"{kept or 'None'} of {len(bars)} tenants reached their targets. Missed: {_few(names)}."


def _few(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return "; ".join([*names[:_MOST_NAMES], *([f"and {more} more"] if more > 0 else [])])


def _latency(whole: Figures, tenants: Iterable[TenantPlan]) -> str | None:
    tenants = tuple(tenants)
    parts = []
    for words, found, limit_ms in (
        (
            "The first token came after",
            whole.latencies.ttft_ms,
            common_limit_ms(tenant.slo.ttft_s for tenant in tenants),
        ),
        (
            "each one after it took",
            whole.latencies.tpot_ms,
            common_limit_ms(tenant.slo.tpot_s for tenant in tenants),
        ),
    ):
        if found is None:
            continue
        promised = "" if limit_ms is None else f" (promised: {tick_duration(limit_ms)})"
        parts.append(
            f"{words} {duration(found.p50)} at p50 and {duration(found.p95)} at p95{promised}"
        )
    return f"{'; '.join(parts)}." if parts else None


def _throughput(whole: Figures) -> str:
    line = (
        f"The server gave {figure(whole.requests_per_minute / 60)} answers and "
        f"{figure(whole.output_tokens_per_s)} output tokens a second"
    )
    if whole.attainment is not None:
        line += f"; {figure(whole.goodput_rps)} answers a second were in time (goodput)"
    return f"{line}."


def _queue(run: Run, columns: Columns) -> str | None:
    waiting = [sample.waiting for sample in run.timeline if sample.waiting is not None]
    parts = []
    if waiting and max(waiting) >= 1:
        parts.append(
            f"{figure(fmean(waiting))} requests waited for the server on average, "
            f"{count(max(waiting))} at most"
        )
    elif waiting:
        parts.append("No request was seen waiting for the server")
    backlog = Backlog.of(columns)
    if backlog is not None and falls_behind([backlog]):
        parts.append(
            f"{'what' if parts else 'What'} was unanswered grew until sending ended: this rate is "
            "more than the server can do"
        )
    return f"{'; '.join(parts)}." if parts else None


def _cache(whole: Figures) -> str | None:
    cache = whole.cache
    if cache.all is None:
        return None
    if cache.all == 0:
        return "No prompt token came from the cache."
    line = f"{percent(cache.all)} of the prompt tokens came from the cache"
    tiers = {"the device": cache.device, "DRAM": cache.dram, "Redis": cache.redis}
    shares = {name: share for name, share in tiers.items() if share}
    if len(shares) == 1:
        return f"{line}, all from {next(iter(shares))}."
    if shares:
        parts = (f"{percent(share)} from {name}" for name, share in shares.items())
        return f"{line}: {', '.join(parts)}."
    return f"{line}."


def _cost(whole: Figures, usd_per_hour: float | None) -> str | None:
    cost = whole.cost
    if cost.machine_per_million_output is not None and usd_per_hour is not None:
        return (
            f"A million output tokens cost {usd(cost.machine_per_million_output)} of a machine at "
            f"{usd(usd_per_hour)} an hour."
        )
    if cost.charged_per_million_output is not None:
        return (
            f"The server charged {usd(cost.charged_per_million_output)} per million output tokens."
        )
    return None
