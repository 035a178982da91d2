"""What the routing parts found, as tables and lines."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.bench.routing import RoutingFigures
from loadtest.bench.routing_decision import DecisionFigures
from loadtest.bench.routing_policies import OURS, PolicyFigure
from loadtest.bench.routing_proxy import ProxyFigure
from loadtest.bench.routing_workers import IN_PROCESS, WORKER, WorkerFigures
from loadtest.tables import Table, number

_SHOWN_FAILURES = 5


def routing_tables(found: RoutingFigures) -> list[Table]:
    """One table for each part that was asked for, two for the policies."""
    tables = []
    if found.decision is not None:
        tables.append(_decision_table(found.decision))
    if found.proxy is not None:
        tables.append(_proxy_table(found.proxy))
    if found.policies is not None:
        tables += [_policy_table(found.policies), _lead_table(found.policies)]
    if found.workers is not None:
        tables.append(_worker_table(found.workers))
    return tables


def routing_notes(found: RoutingFigures) -> list[str]:
    """One line per thing that a reader of the figures has to know."""
    lines = []
    if found.decision is not None:
        made = found.decision
        lines.append(
            f"decisions: prompts of {made.prompt_tokens:,} tokens, {made.replicas} replicas, "
            f"{made.blocks:,} blocks in the directory at {made.bytes_per_block:.0f} bytes each"
        )
    failures = list(dict.fromkeys(found.failures))
    return lines + [f"FAILED: {line}" for line in failures[:_SHOWN_FAILURES]]


def _decision_table(found: DecisionFigures) -> Table:
    rows = [
        (one.what, number(one.p50_us), number(one.p99_us), _aim(one.aim_p50_us, one.aim_p99_us))
        for one in found.rows
    ]
    return Table(("hashing and deciding", "p50 µs", "p99 µs", "aim p50, p99"), tuple(rows))


def _aim(p50_us: float | None, p99_us: float | None) -> str:
    if p50_us is None:
        return number(None)
    return f"{p50_us:g}" if p99_us is None else f"{p50_us:g}, {p99_us:g}"


def _proxy_table(found: Sequence[ProxyFigure]) -> Table:
    headers = (
        "through the gateway",
        "at once",
        "direct p50 ms",
        "added p50 ms",
        "added p99 ms",
        "p99 ms",
        "requests/s (direct)",
        "core-s/1000",
    )
    rows = [
        (
            f"{one.case}, {one.gateway}",
            str(one.concurrency),
            f"{one.direct_ms.p50:.3f}",
            f"{one.added_p50_ms:.3f}",
            number(one.added_p99_ms),
            number(one.proxied_ms.p99),
            f"{number(one.proxied_per_s)} ({number(one.direct_per_s)})",
            number(None) if one.cpu_s is None else f"{one.cpu_s:.3f}",
        )
        for one in found
    ]
    return Table(headers, tuple(rows))


def _policy_table(found: Sequence[PolicyFigure]) -> Table:
    headers = (
        "policy, load",
        "hit rate (ideal)",
        "TTFT p50 ms",
        "TTFT p95 ms",
        "tok/s",
        "by replica",
    )
    rows = [
        (
            f"{one.policy}, {one.load}",
            f"{one.hit_rate:.1%} ({one.ideal_hit_rate:.1%})",
            number(one.ttft_ms.p50),
            number(one.ttft_ms.p95),
            number(one.output_tokens_per_s),
            " / ".join(f"{share:.0%}" for share in one.shares),
        )
        for one in found
    ]
    return Table(headers, tuple(rows))


def _lead_table(found: Sequence[PolicyFigure]) -> Table:
    """By what factor ours is better than each of the others."""
    headers = (f"{OURS} over", "points of hits", "TTFT p50", "TTFT p95", "tok/s")
    ours = {one.load: one for one in found if one.policy == OURS}
    rows = []
    for other in found:
        mine = ours.get(other.load)
        if mine is None or other is mine:
            continue
        rows.append(
            (
                f"{other.policy}, {other.load}",
                f"{100 * (mine.hit_rate - other.hit_rate):+.1f}",
                f"{other.ttft_ms.p50 / mine.ttft_ms.p50:.2f}×",
                f"{other.ttft_ms.p95 / mine.ttft_ms.p95:.2f}×",
                f"{mine.output_tokens_per_s / other.output_tokens_per_s:.2f}×",
            )
        )
    return Table(headers, tuple(rows))


def _worker_table(found: WorkerFigures) -> Table:
    rows = [
        (label, f"{ratio.ratio:.3f}", f"{ratio.low:.3f}–{ratio.high:.3f}", str(ratio.pairs))
        for label, ratio in found.ratios.items()
    ]
    return Table((f"{WORKER} over {IN_PROCESS}", "ratio", "95 %", "pairs"), tuple(rows))
