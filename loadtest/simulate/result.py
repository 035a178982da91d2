"""What a simulation gives: a run like a live one, and what only a simulation knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadtest.columns import Columns
from loadtest.record import Run
from loadtest.simulate.spec import SimSpec
from loadtest.stats.goodput import Goodput, kept_rows

_SHARES = (50, 90, 95, 99)


class Work(NamedTuple):
    """What the fleet did. `busy_s` by replica is the time in steps, `line_s` the sum of all times
    in the replicas' lines. `blocks` are those of the prompts that were answered, `blocks_found`
    those found in any tier. `queued` and `downgraded` count what newcomers were told at the gate.
    """

    busy_s: tuple[float, ...]
    line_s: float
    steps: int
    preemptions: int
    loads: int
    device_evictions: int
    dram_evictions: int
    redis_evictions: int
    blocks: int
    blocks_found: int
    queued: int
    downgraded: int


@dataclass(frozen=True, slots=True)
class SimResult:
    """`ideal_hit_rate` is that of one endless cache which all asked who were let in: nobody finds
    more. `simulated_s` is the time from the first arrival to the last end, `wall_s` what simulating
    it took."""

    run: Run
    spec: SimSpec
    work: Work
    ideal_hit_rate: float
    simulated_s: float
    wall_s: float

    @property
    def hit_rate(self) -> float:
        """The share of prompt blocks that was found in any tier; 0.0 without blocks."""
        return self.work.blocks_found / self.work.blocks if self.work.blocks else 0.0


def as_json(result: SimResult) -> dict[str, Any]:
    """One object of plain values: rates and shares as numbers, times in milliseconds, None for what
    there is nothing of."""
    run, work, spec = result.run, result.work, result.spec
    columns = Columns.of(run.records)
    ok = columns.ok
    kept, goodput = kept_rows(columns, run.tenants), Goodput.of(columns, run.tenants)
    simulated_s = result.simulated_s
    answered = int(ok.sum())
    cached = {
        tier: float(np.nansum(getattr(columns, f"{tier}_tokens")))
        for tier in ("device", "dram", "redis")
    }
    prompt_tokens = float(columns.prompt_tokens[ok].sum())
    busy = [each / simulated_s for each in work.busy_s] if simulated_s else []
    reasons = columns.reason
    refused = {
        name: int(((reasons.codes == code) & ~ok).sum())
        for code, name in enumerate(reasons.names)
        if name is not None
    }
    return {
        "policy": spec.policy,
        "replicas": spec.replicas,
        "seed": spec.seed,
        "workload": run.workload,
        "requests": len(columns),
        "answered": answered,
        "rejected": len(columns) - answered,
        "rejected_by_reason": {name: count for name, count in refused.items() if count},
        "hit_rate": result.hit_rate,
        "ideal_hit_rate": result.ideal_hit_rate,
        "hit_rate_tokens": sum(cached.values()) / prompt_tokens if prompt_tokens else 0.0,
        "hit_rate_tokens_by_tier": {
            tier: tokens / prompt_tokens if prompt_tokens else 0.0
            for tier, tokens in cached.items()
        },
        "ttft_ms": _spread(columns.ttft_s[ok]),
        "tpot_ms": _spread(columns.tpot_s[ok]),
        "e2e_ms": _spread((columns.ended_s - columns.sent_s)[ok]),
        "goodput_rps": goodput.kept / simulated_s if simulated_s else 0.0,
        "throughput_rps": answered / simulated_s if simulated_s else 0.0,
        "attainment": goodput.attainment,
        "output_tokens_per_s": (
            float(columns.output_tokens[ok].sum()) / simulated_s if simulated_s else 0.0
        ),
        "queue": {
            "line_ms_mean": 1e3 * work.line_s / answered if answered else None,
            "gate_queued": work.queued,
            "gate_downgraded": work.downgraded,
        },
        "utilization": {
            "mean": sum(busy) / len(busy) if busy else 0.0,
            "min": min(busy, default=0.0),
            "max": max(busy, default=0.0),
        },
        "tenants": _tenants(columns, kept, run, simulated_s),
        "steps": work.steps,
        "preemptions": work.preemptions,
        "loads": work.loads,
        "evictions": {
            "device": work.device_evictions,
            "dram": work.dram_evictions,
            "redis": work.redis_evictions,
        },
        "simulated_s": simulated_s,
        "wall_s": result.wall_s,
    }


def _tenants(
    columns: Columns, kept: NDArray[np.bool_], run: Run, simulated_s: float
) -> dict[str, dict[str, Any]]:
    """Each by its name. `share_of_work` is its part of all that was computed, tokens of prompts and
    answers, for what was answered before the last request came: later nobody has to share."""
    ok = columns.ok
    timely = ok & (columns.ended_s <= columns.sent_s.max(initial=0.0))
    cached = np.nan_to_num(columns.cached_tokens)
    work = np.where(timely, columns.prompt_tokens - cached + columns.output_tokens, 0.0)
    weights = {tenant.name: tenant.weight for tenant in run.tenants}
    found: dict[str, dict[str, Any]] = {}
    for name, rows in columns.tenant.groups().items():
        own = ok[rows]
        found[name] = {
            "weight": weights[name],
            "requests": len(own),
            "answered": int(own.sum()),
            "goodput_rps": float(kept[rows].sum()) / simulated_s if simulated_s else 0.0,
            "share_of_work": float(work[rows].sum() / work.sum()) if work.any() else 0.0,
            "ttft_ms": _spread(columns.ttft_s[rows][own]),
        }
    return found


def _spread(seconds: NDArray[np.float64]) -> dict[str, float] | None:
    seconds = seconds[~np.isnan(seconds)]
    if not seconds.size:
        return None
    values = np.percentile(seconds, _SHARES)
    spread = {f"p{share}": 1e3 * float(value) for share, value in zip(_SHARES, values, strict=True)}
    return {"mean": 1e3 * float(seconds.mean()), **spread}
