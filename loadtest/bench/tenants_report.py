"""What the tenants parts found, as tables with the ratios that matter, and as lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from loadtest.bench.tenants import TenantsFigures
from loadtest.bench.tenants_goodput import (
    AT_CAPACITY,
    FIFO,
    OVERLOAD,
    GoodputFigures,
    GoodputRun,
)
from loadtest.bench.tenants_neighbour import NeighbourFigure, NeighbourFigures
from loadtest.bench.tenants_overhead import AIM_US, LOCAL, OverheadFigures
from loadtest.tables import Table, number

_LEAST_ATTAINMENT = 0.95


def tenants_tables(found: TenantsFigures) -> list[Table]:
    """Two tables for each part that was asked for."""
    tables = []
    if found.overhead is not None:
        tables += [_overhead_table(found.overhead), _parts_table(found.overhead)]
    if found.neighbour is not None:
        tables += [_neighbour_table(found.neighbour), _neighbour_ratios(found.neighbour)]
    if found.goodput is not None:
        tables += [_goodput_table(found.goodput), _goodput_ratios(found.goodput)]
    return tables


def tenants_notes(found: TenantsFigures) -> list[str]:
    """One line per thing that a reader of the figures has to know."""
    lines = []
    if found.neighbour is not None:
        plan = found.neighbour.plan
        lines.append(
            f"neighbour: {plan.long_requests} prompts of {plan.long.prompt_tokens:,} tokens at "
            f"once, beside {plan.per_s:g} a second of {plan.short.prompt_tokens:,}"
        )
    if found.goodput is not None:
        goodput = found.goodput
        per_s = ", ".join(number(each) for each in goodput.capacity_per_s)
        lines.append(
            f"goodput: {per_s} requests/s of {goodput.plan.shape.prompt_tokens} tokens in and "
            f"{goodput.plan.shape.output_tokens} out are what the server can do; promised were "
            f"{_promised(goodput)}"
        )
    return lines


def _overhead_table(found: OverheadFigures) -> Table:
    headers = (
        "limits and promises",
        "at once",
        "direct p50 ms",
        "none p50 ms",
        "all p50 ms",
        "added p50 µs",
        "added p99 µs",
        "added core-s/1000",
        "aim p50",
    )
    rows = [
        (
            f"{one.where}: {one.case}",
            str(one.concurrency),
            f"{one.direct_ms.p50:.3f}",
            f"{one.free_ms.p50:.3f}",
            f"{one.held_ms.p50:.3f}",
            number(one.added_p50_ms * 1e3),
            number(one.added_p99_ms * 1e3),
            number(None) if one.cpu_added_s is None else f"{one.cpu_added_s:.3f}",
            f"≤ {AIM_US:g}" if one.where == LOCAL and one.concurrency == 1 else number(None),
        )
        for one in found.requests
    ]
    return Table(headers, tuple(rows))


def _parts_table(found: OverheadFigures) -> Table:
    rows = [(one.what, number(one.p50_us), number(one.p99_us)) for one in found.parts]
    return Table(("parts, in process", "p50 µs", "p99 µs"), tuple(rows))


def _neighbour_table(found: NeighbourFigures) -> Table:
    headers = (
        "noisy neighbour",
        "short requests",
        "TTFT p50 ms",
        "TTFT p95 ms",
        "as promised",
        "long tok/s",
    )
    rows = [_neighbour_row(one) for one in (found.alone, found.together, found.fifo)]
    return Table(headers, tuple(rows))


def _neighbour_row(one: NeighbourFigure) -> tuple[str, ...]:
    ttft_ms = one.quiet_ttft_ms
    return (
        one.arrangement,
        "0" if ttft_ms is None else str(ttft_ms.count),
        number(None if ttft_ms is None else ttft_ms.p50),
        number(None if ttft_ms is None else ttft_ms.p95),
        _percent(one.attainment),
        number(median(one.noisy_tokens_per_s)),
    )


def _neighbour_ratios(found: NeighbourFigures) -> Table:
    alone, together, fifo = found.alone, found.together, found.fifo
    rows = [
        (
            "short TTFT p95 over alone",
            _ratio(_p95(together), _p95(alone)),
            "≤ 1.50×",
            _ratio(_p95(fifo), _p95(alone)),
        ),
        (
            "short requests as promised",
            _percent(together.attainment),
            f"≥ {_LEAST_ATTAINMENT:.0%}",
            _percent(fifo.attainment),
        ),
        (
            "long tok/s over alone",
            _paired(together.noisy_tokens_per_s, alone.noisy_tokens_per_s),
            "≥ 0.85×",
            _paired(fifo.noisy_tokens_per_s, alone.noisy_tokens_per_s),
        ),
    ]
    return Table(("beside the neighbour", "by tenant", "aim", fifo.arrangement), tuple(rows))


def _p95(one: NeighbourFigure) -> float | None:
    return None if one.quiet_ttft_ms is None else one.quiet_ttft_ms.p95


def _goodput_table(found: GoodputFigures) -> Table:
    headers = (
        "goodput",
        "offered/s",
        "as promised/s",
        "answered",
        "shed",
        "given up",
        "of answers, by tenant",
        "tokens by tenant",
    )
    rows = [
        _goodput_row(f"{name}, {turn + 1}", run)
        for name, runs in (
            (AT_CAPACITY, found.at_capacity),
            (OVERLOAD, found.overload),
            (FIFO, found.fifo),
        )
        for turn, run in enumerate(runs)
    ]
    return Table(headers, tuple(rows))


def _goodput_row(name: str, run: GoodputRun) -> tuple[str, ...]:
    return (
        name,
        number(run.offered_per_s),
        number(run.goodput_per_s),
        str(run.answered),
        str(run.shed),
        str(run.given_up),
        " / ".join(f"{share:.0%}" for share in run.attainment),
        " / ".join(f"{share:.1%}" for share in run.shares),
    )


def _goodput_ratios(found: GoodputFigures) -> Table:
    due = " / ".join(f"{share:.1%}" for share in found.plan.shares)
    rows = [
        ("goodput over first come, first served", _factor(found.over_fifo), "≥ 1.50×"),
        ("goodput over that at capacity", _factor(found.over_capacity), "≥ 1.00×"),
        (
            f"tokens by tenant, due {due}",
            " / ".join(f"{s:.1%}" for s in found.shares),
            number(None),
        ),
        ("the worst of them off by", f"{found.worst_share:.1%}", "≤ 5.0%"),
    ]
    return Table(("in overload", "found", "aim"), tuple(rows))


def _promised(found: GoodputFigures) -> str:
    slo = found.plan.slo
    targets = {"to the first token": slo.ttft_s, "between tokens": slo.tpot_s}
    return " and ".join(
        f"{value * 1e3:g} ms {what}" for what, value in targets.items() if value is not None
    )


def _paired(ours: Sequence[float], alone: Sequence[float]) -> str:
    """The median of the ratios of each round."""
    return _factor(median(mine / theirs for mine, theirs in zip(ours, alone, strict=True)))


def _ratio(value: float | None, over: float | None) -> str:
    return _factor(value / over if value is not None and over else None)


def _factor(factor: float | None) -> str:
    if factor is None:
        return number(None)
    return "∞" if math.isinf(factor) else f"{factor:.2f}×"


def _percent(share: float | None) -> str:
    return number(None) if share is None else f"{share:.1%}"
