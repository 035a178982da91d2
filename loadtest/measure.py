"""From the answers of a closed loop to figures: distributions, repetitions, medians."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from loadtest.client import LoopOutcome, Target, run_closed_loop
from loadtest.completion import Completion, Failure
from loadtest.workloads import Workload


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, interpolated linearly between
    neighbours. Raises ValueError for no values or a share outside."""
    if not values or not 0 <= share <= 1:
        raise ValueError("a percentile needs values and a share from 0 to 1")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a set of measured times looks like, all in one unit."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """None for no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p95, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99))
        return cls(len(ordered), fmean(ordered), ordered[0], p50, p90, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class PassFigures:
    """One pass of one repetition, whole answers only. `tpot_ms` counts answers of two tokens or
    more; `cached_tokens` adds up what the server says it took from its cache (None: it does not
    say)."""

    name: str
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    prompt_tokens: int
    cached_tokens: int | None
    tokens_per_chunk: float | None


@dataclass(frozen=True, slots=True)
class Repetition:
    """A workload run once. `failures` has one line per request that has no whole answer."""

    workload: str
    seed: int
    requests: int
    wall_s: float
    output_tokens: int
    passes: tuple[PassFigures, ...]
    failures: tuple[str, ...]

    @property
    def output_tokens_per_s(self) -> float | None:
        """Tokens of whole answers over the wall time; None if no answer came."""
        return self.output_tokens / self.wall_s if self.wall_s > 0 else None


async def run_once(target: Target, workload: Workload, seed: int) -> Repetition:
    """Run a workload once and sum it up."""
    return sum_up(workload, seed, await run_closed_loop(target, workload, seed))


def sum_up(workload: Workload, seed: int, outcome: LoopOutcome) -> Repetition:
    """The figures of one closed loop."""
    completions = [result for result in outcome.results if isinstance(result, Completion)]
    return Repetition(
        workload=workload.name,
        seed=seed,
        requests=len(outcome.results),
        wall_s=outcome.wall_s,
        output_tokens=sum(one.output_tokens for one in completions),
        passes=tuple(
            _pass_figures(name, [one for one in completions if one.pass_name == name])
            for name in workload.passes
        ),
        failures=tuple(
            f"{workload.name}: {result.reason}"
            for result in outcome.results
            if isinstance(result, Failure)
        ),
    )


def _pass_figures(name: str, completions: list[Completion]) -> PassFigures:
    cached = [one.cached_tokens for one in completions if one.cached_tokens is not None]
    chunks = sum(one.chunks for one in completions)
    return PassFigures(
        name=name,
        ttft_ms=Distribution.of(one.ttft_s * 1e3 for one in completions),
        tpot_ms=Distribution.of(one.tpot_s * 1e3 for one in completions if one.tpot_s is not None),
        e2e_ms=Distribution.of(one.e2e_s * 1e3 for one in completions),
        prompt_tokens=sum(one.prompt_tokens for one in completions),
        cached_tokens=sum(cached) if cached else None,
        tokens_per_chunk=sum(one.output_tokens for one in completions) / chunks if chunks else None,
    )
