"""A run's figures for a terminal, or as Markdown for a document."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from loadtest.record import ClientHealth, Outcome, Run
from loadtest.stats.distribution import Distribution
from loadtest.summary import Cost, Figures, Summary
from loadtest.tables import Table, number, percent
from policies.slo import NO_SLO, Slo

_SHOWN_REASONS = 5
_SHOWN_PARTS = 20
"""Tenants or labels: a terminal is no place for a thousand of them."""
_LONGEST_LINE = 160
_KIND = {"live": "measured", "simulated": "simulated, not measured"}


@dataclass(frozen=True, slots=True)
class Block:
    """What stands under one title: lines, a table, and lines again."""

    title: str
    lines: tuple[str, ...] = ()
    table: Table | None = None
    remarks: tuple[str, ...] = ()


def lines_of(run: Run, summary: Summary) -> list[str]:
    """For a terminal, without colours: the client's complaints come last, where they are read."""
    lines: list[str] = []
    for block in blocks_of(run, summary):
        table = [] if block.table is None else block.table.text().split("\n")
        lines += [block.title, *block.lines, *table, *block.remarks, ""]
    return lines[:-1]


def markdown_of(run: Run, summary: Summary) -> str:
    """The same as a document, with a newline at the end."""
    parts = []
    for depth, block in enumerate(blocks_of(run, summary)):
        parts.append(f"{'##' if depth == 0 else '###'} {_marked_down(block.title)}")
        parts += _bullets(block.lines)
        parts += [] if block.table is None else [_escaped(block.table).markdown()]
        parts += _bullets(block.remarks)
    return "\n\n".join(parts) + "\n"


def blocks_of(run: Run, summary: Summary) -> list[Block]:
    """Everything there is to say, in the order of interest: of a run without a whole answer that is
    what became of its requests. Text that came from elsewhere, such as
    a server's reasons, has no control characters here."""
    slos = {tenant.name: tenant.slo for tenant in run.tenants}
    whole = summary.whole
    answered = whole.outcomes.get(Outcome.OK, 0) > 0
    blocks = [_head(run, whole)]
    if answered:
        blocks += [_latency(whole), _throughput(whole)]
    if len(summary.by_tenant) > 1 or any(slo.promises for slo in slos.values()):
        blocks.append(_tenants(summary.by_tenant, slos))
    if answered and len(summary.by_label) > 1:
        blocks.append(_labels(summary.by_label))
    blocks.append(_outcomes(whole))
    if summary.reasons:
        blocks.append(_reasons(summary.reasons))
    if answered:
        blocks.append(_cache(whole))
    if run.client is not None:
        blocks.append(_client(run.client))
    return blocks


def _head(run: Run, whole: Figures) -> Block:
    answered = f"{whole.outcomes.get(Outcome.OK, 0):,} of {whole.requests:,} requests"
    return Block(
        _plain(f"{run.name}: {run.workload}"),
        tuple(
            _plain(line)
            for line in (
                f"{_KIND[run.kind]}: {run.target}",
                f"{answered} answered whole; all took {number(run.wall_s)} s",
                *run.notes,
            )
        ),
    )


def _latency(whole: Figures) -> Block:
    of = whole.latencies
    rows = tuple(
        _latency_row(name, distribution)
        for name, distribution in (
            ("time to first token", of.ttft_ms),
            ("time per output token", of.tpot_ms),
            ("inter-token time", of.inter_token_ms),
            ("end to end", of.e2e_ms),
            ("time to publish", of.time_to_publish_ms),
        )
    )
    coarse = whole.tokens_per_piece
    remarks = (
        (f"inter-token times are between pieces of {number(coarse)} tokens on average",)
        if coarse is not None and coarse > 1.05 and of.inter_token_ms is not None
        else ()
    )
    headers = ("whole answers, ms", "mean", "p50", "p90", "p95", "p99", "max")
    return Block("Latency", table=Table(headers, rows), remarks=remarks)


def _latency_row(name: str, of: Distribution | None) -> tuple[str, ...]:
    values = (None,) * 6 if of is None else (of.mean, of.p50, of.p90, of.p95, of.p99, of.max)
    return (name, *map(number, values))


def _throughput(whole: Figures) -> Block:
    rows = [
        ("output tokens per second", number(whole.output_tokens_per_s)),
        ("requests per minute", number(whole.requests_per_minute)),
        ("goodput, requests per second", number(whole.goodput_rps)),
    ]
    if whole.attainment is not None:
        rows.append(("promises kept (95 % interval)", _attainment(whole)))
    rows += _cost_rows(whole.cost)
    return Block("Throughput, goodput and cost", table=Table(("whole answers", ""), tuple(rows)))


def _cost_rows(cost: Cost) -> Iterator[tuple[str, str]]:
    for name, value in (
        ("charged, USD per request", cost.charged_per_request),
        ("charged, USD per million output tokens", cost.charged_per_million_output),
        ("machine, USD per request", cost.machine_per_request),
        ("machine, USD per million output tokens", cost.machine_per_million_output),
    ):
        if value is not None:
            yield name, _usd(value)


def _tenants(by_tenant: Mapping[str, Figures], slos: Mapping[str, Slo]) -> Block:
    worst_first = sorted(by_tenant.items(), key=lambda item: _rank(item[1]))
    rows = tuple(
        (
            _plain(name),
            _promise(slos.get(name, NO_SLO)),
            f"{of.requests:,}",
            number(of.goodput_rps),
            _attainment(of),
            *_p50_and_p95(of.latencies.ttft_ms),
            *_p50_and_p95(of.latencies.tpot_ms),
        )
        for name, of in worst_first[:_SHOWN_PARTS]
    )
    headers = ("tenant", "promised, ms", "requests", "goodput /s", "kept (95 % interval)")
    return Block(
        "Tenants", table=Table((*headers, *_TTFT_AND_TPOT), rows), remarks=_others(by_tenant)
    )


def _labels(by_label: Mapping[str, Figures]) -> Block:
    rows = tuple(
        (
            _plain(name),
            f"{of.requests:,}",
            percent(of.cache.all),
            *_p50_and_p95(of.latencies.ttft_ms),
            *_p50_and_p95(of.latencies.tpot_ms),
        )
        for name, of in islice(by_label.items(), _SHOWN_PARTS)
    )
    headers = ("kind", "requests", "cached", *_TTFT_AND_TPOT)
    return Block("By kind of request", table=Table(headers, rows), remarks=_others(by_label))


def _rank(of: Figures) -> float:
    """Whose promise was kept least comes first, and who has none behind all others."""
    return math.inf if of.attainment is None else of.attainment


def _others(parts: Mapping[str, Figures]) -> tuple[str, ...]:
    hidden = len(parts) - _SHOWN_PARTS
    return (f"and {hidden:,} others",) if hidden > 0 else ()


_TTFT_AND_TPOT = ("TTFT p50 ms", "p95", "TPOT p50 ms", "p95")


def _p50_and_p95(of: Distribution | None) -> tuple[str, str]:
    return (number(None), number(None)) if of is None else (number(of.p50), number(of.p95))


def _outcomes(whole: Figures) -> Block:
    if not whole.requests:
        return Block("Outcomes", ("nothing was sent",))
    if whole.outcomes == {Outcome.OK: whole.requests}:
        return Block("Outcomes", (f"all {whole.requests:,} requests answered whole and as asked",))
    rows = tuple(
        (outcome.value, f"{count:,}", percent(count / whole.requests))
        for outcome, count in sorted(whole.outcomes.items(), key=lambda item: -item[1])
    )
    return Block("Outcomes", table=Table(("outcome", "requests", "share"), rows))


def _reasons(reasons: Sequence[tuple[str, int]]) -> Block:
    shown = tuple(f"{count:,} × {_plain(reason)}" for reason, count in reasons[:_SHOWN_REASONS])
    hidden = len(reasons) - len(shown)
    return Block("Why", shown, remarks=(f"and {hidden:,} other reasons",) if hidden else ())


def _cache(whole: Figures) -> Block:
    share = whole.cache
    if share.all is None:
        return Block("Cache", ("the server does not say what came from its cache",))
    rows = [("anywhere", share.all)]
    for name, of_tier in (("device", share.device), ("DRAM", share.dram), ("Redis", share.redis)):
        if of_tier is not None:
            rows.append((name, of_tier))
    table = Table(("found in", "prompt tokens"), tuple((name, percent(of)) for name, of in rows))
    return Block("Cache", table=table)


def _client(health: ClientHealth) -> Block:
    rows = (
        ("event loop", number(health.lag_p99_s * 1e3), number(health.lag_max_s * 1e3)),
        ("sending", number(health.late_p99_s * 1e3), number(health.late_max_s * 1e3)),
    )
    line = (
        f"used {percent(health.cpu_share)} of one core, {health.most_open:,} requests open at most"
    )
    verdict = tuple(f"DO NOT TRUST: {_plain(each)}" for each in health.complaints)
    return Block(
        "The client itself",
        (line,),
        Table(("late by, ms", "p99", "max"), rows),
        verdict or ("it kept up: what was measured is the server",),
    )


def _promise(slo: Slo) -> str:
    targets = [
        f"{name} ≤ {target_s * 1e3:g}"
        for name, target_s in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s))
        if target_s is not None
    ]
    return f"{', '.join(targets)} for {slo.target * 100:g} %" if targets else number(None)


def _attainment(of: Figures) -> str:
    if of.attainment is None or of.attainment_low is None or of.attainment_high is None:
        return number(None)
    low, high = of.attainment_low * 100, of.attainment_high * 100
    return f"{percent(of.attainment)} ({low:.1f}–{high:.1f})"


def _usd(value: float) -> str:
    """Three significant digits and at least cents: a token costs millionths of a dollar."""
    places = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:,.{max(places, 2)}f}"


def _plain(text: str) -> str:
    """One line of printable characters: a terminal obeys the others."""
    line = "".join(character if character.isprintable() else " " for character in text).strip()
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…"


def _bullets(lines: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {_marked_down(line)}" for line in lines)] if lines else []


def _escaped(table: Table) -> Table:
    return replace(
        table,
        headers=tuple(map(_marked_down, table.headers)),
        rows=tuple(tuple(map(_marked_down, row)) for row in table.rows),
    )


def _marked_down(text: str) -> str:
    """As text: without what Markdown would take as a mark or as HTML."""
    return "".join(f"\\{each}" if each in _MARKS else each for each in text)


_MARKS = frozenset("\\`*_[]<>|#")
