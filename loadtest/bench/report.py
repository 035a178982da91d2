"""What a campaign found, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from loadtest.bench.batching import BatchingFigures
from loadtest.bench.cache import CacheFigures
from loadtest.bench.campaign import Report
from loadtest.bench.cells import Cell, cells_of, lead, spread
from loadtest.bench.divergence import OUTPUT_TOKENS, Divergence
from loadtest.bench.gateway_cost import GatewayCost
from loadtest.bench.routing import RoutingFigures
from loadtest.bench.tenants import TenantsFigures
from loadtest.bench.workloads import Workload
from loadtest.tables import Table, number

_SHOWN_FAILURES = 5
_STALL_S = 0.02


@dataclass(frozen=True, slots=True)
class Lead:
    """By what factor the first server is better than another in one cell; below 1 it is worse."""

    cell: str
    over: str
    factor: float


def figures(reports: Sequence[Report], workloads: Sequence[Workload]) -> Table:
    """One row per cell: each server's median over its repetitions, its range, and with several
    servers by what factor the first leads each of the others."""
    first, *others = reports
    headers = ["cell", *(f"{one.name} (range)" for one in reports)]
    headers += [f"lead over {other.name}" for other in others]
    rows = []
    for cell in _cells(workloads):
        row = [f"{cell.workload} {cell.label} {cell.unit}"]
        row += [_spread(cell, one) for one in reports]
        row += [_factor(lead(cell, first.repetitions, other.repetitions)) for other in others]
        rows.append(tuple(row))
    if any(report.peak_rss_bytes is not None for report in reports):
        rows.append(_memory_row(first, others))
    return Table(tuple(headers), tuple(rows))


def gateway_table(cost: GatewayCost) -> Table:
    """The gateway's own time for one call at a time."""
    rows = [
        (f"{name} ms", number(one.p50), number(one.p90), number(one.p99), number(one.max))
        for name, one in (
            ("call, not streamed", cost.call_ms),
            ("of that the engine's", cost.engine_ms),
            ("added by the gateway", cost.added_ms),
        )
    ]
    return Table(("at concurrency 1", "p50", "p90", "p99", "max"), tuple(rows))


def gateway_note(cost: GatewayCost) -> str:
    """How the gateway's event loop kept its time while W2 ran, in one line."""
    lag = cost.lag
    return (
        f"event loop under W2: {lag.later_than(_STALL_S)} of {lag.timers} timers late by over "
        f"{_STALL_S * 1e3:g} ms, none by over {lag.worst_at_most_s * 1e3:g} ms"
    )


def divergence_notes(found: Divergence) -> list[str]:
    """How bfloat16 differs from float32, in two lines."""
    return [
        f"bfloat16 against float32: {found.answers_that_differ} of {found.answers} greedy answers "
        f"of up to {OUTPUT_TOKENS} tokens differ",
        f"reading the same text: another token rated first at {found.positions_that_differ} of "
        f"{found.positions} positions ({found.positions_that_differ / found.positions:.2%})",
    ]


def leads(reports: Sequence[Report], workloads: Sequence[Workload]) -> list[Lead]:
    """The first server's lead over each of the others in every cell that both have."""
    first, *others = reports
    return [
        Lead(f"{cell.workload} {cell.label}", other.name, factor)
        for cell in _cells(workloads)
        for other in others
        if (factor := lead(cell, first.repetitions, other.repetitions)) is not None
    ]


def notes(reports: Sequence[Report]) -> list[str]:
    """One line per thing that a reader of the figures has to know: failed requests, what came from
    the cache, how coarse the streams were."""
    lines = []
    for report in reports:
        lines += _failure_lines(report)
        names = dict.fromkeys(one.workload for one in report.repetitions)
        lines += [_cache_line(report, name) for name in names]
    return lines


def as_json(
    reports: Sequence[Report],
    workloads: Sequence[Workload],
    machine: Sequence[str],
    gateway: GatewayCost | None = None,
    divergence: Divergence | None = None,
    cache: CacheFigures | None = None,
    routing: RoutingFigures | None = None,
    tenants: TenantsFigures | None = None,
    batching: BatchingFigures | None = None,
) -> bytes:
    """Every repetition with all its percentiles, indented, with a newline at the end."""
    document = {
        "machine": list(machine),
        "workloads": list(workloads),
        "reports": list(reports),
        "leads": leads(reports, workloads) if reports else [],
        "gateway": gateway,
        "divergence": divergence,
        "cache": cache,
        "routing": routing,
        "tenants": tenants,
        "batching": batching,
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _cells(workloads: Sequence[Workload]) -> list[Cell]:
    return [cell for workload in workloads for cell in cells_of(workload)]


def _spread(cell: Cell, report: Report) -> str:
    found = spread(cell, report.repetitions)
    if found is None:
        return number(None)
    return f"{number(found.median)} ({number(found.low)}–{number(found.high)})"


def _factor(factor: float | None) -> str:
    return number(None) if factor is None else f"{factor:.2f}×"


def _memory_row(first: Report, others: Sequence[Report]) -> tuple[str, ...]:
    row = ["peak RSS GB"]
    for report in (first, *others):
        peak = report.peak_rss_bytes
        row.append(number(None if peak is None else peak / 1e9))
    for other in others:
        mine, theirs = first.peak_rss_bytes, other.peak_rss_bytes
        row.append(_factor(theirs / mine if mine and theirs else None))
    return tuple(row)


def _failure_lines(report: Report) -> list[str]:
    total = sum(one.requests for one in report.repetitions)
    failures = report.failures
    if not failures:
        return [f"{report.name}: all {total} requests answered whole"]
    shown = list(dict.fromkeys(failures))[:_SHOWN_FAILURES]
    return [f"{report.name}: {len(failures)} of {total} requests FAILED", *shown]


def _cache_line(report: Report, workload: str) -> str:
    parts = []
    runs = [one for one in report.repetitions if one.workload == workload]
    for index, figures_of_pass in enumerate(runs[0].passes):
        cached = [run.passes[index].cached_tokens for run in runs]
        known = [count for count in cached if count is not None]
        prompts = sum(run.passes[index].prompt_tokens for run in runs)
        share = f"{sum(known) / prompts:.0%}" if known and prompts else "unknown"
        coarse = [run.passes[index].tokens_per_chunk for run in runs]
        per_chunk = number(max((value for value in coarse if value is not None), default=None))
        parts.append(f"{figures_of_pass.name}: {share} cached, {per_chunk} tokens per chunk")
    return f"{report.name} {workload}: {'; '.join(parts)}"
