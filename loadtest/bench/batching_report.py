"""What the batching part found, as tables and as a line."""

from __future__ import annotations

from statistics import median

from loadtest.bench.batching import BatchingFigures, ModeFigure, Waits
from loadtest.tables import Table, number


def batching_tables(found: BatchingFigures) -> list[Table]:
    """What short and long requests waited in each mode, and by what factor longer than with
    continuous batching."""
    return [_waits_table(found), _ratios_table(found)]


def batching_note(found: BatchingFigures) -> str:
    """What was sent, in one line."""
    plan = found.plan
    low, high = plan.short_outputs
    return (
        f"batching: {plan.requests} requests in {plan.seconds:g} s, {plan.long_requests} of them "
        f"with answers of {plan.long.output_tokens} tokens, the others of {low} to {high}; "
        f"{plan.size} at once, in batches of up to {plan.size}"
    )


def _waits_table(found: BatchingFigures) -> Table:
    headers = (
        "batching: answers",
        "requests",
        "TTFT p50 ms",
        "TTFT p95 ms",
        "e2e p50 ms",
        "e2e p95 ms",
        "output tok/s",
    )
    rows = [
        row
        for figure in found.modes
        for row in (
            _waits_row(f"{figure.mode}: short", figure.short, median(figure.output_tokens_per_s)),
            _waits_row(f"{figure.mode}: long", figure.long, None),
        )
    ]
    return Table(headers, tuple(rows))


def _waits_row(name: str, waits: Waits, tokens_per_s: float | None) -> tuple[str, ...]:
    ttft_ms, e2e_ms = waits.ttft_ms, waits.e2e_ms
    times = (ttft_ms.p50, ttft_ms.p95, e2e_ms.p50, e2e_ms.p95)
    said = "" if tokens_per_s is None else number(tokens_per_s)  # of both kinds together
    return (name, str(ttft_ms.count), *map(number, times), said)


def _ratios_table(found: BatchingFigures) -> Table:
    continuous, *others = found.modes
    headers = ("over continuous", *(figure.mode.value for figure in others))
    rows = [
        (name, *(_factor(_times(figure)[index], own) for figure in others))
        for index, (name, own) in enumerate(zip(_TIMES, _times(continuous), strict=True))
    ]
    return Table(headers, tuple(rows))


_TIMES = ("short TTFT p50", "short TTFT p95", "short e2e p50", "short e2e p95", "long e2e p50")


def _times(figure: ModeFigure) -> tuple[float, ...]:
    short, long = figure.short, figure.long
    return (
        short.ttft_ms.p50,
        short.ttft_ms.p95,
        short.e2e_ms.p50,
        short.e2e_ms.p95,
        long.e2e_ms.p50,
    )


def _factor(value: float, over: float) -> str:
    return f"{value / over:.2f}×" if over else number(None)
