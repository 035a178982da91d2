"""From the answers of a closed loop to figures: distributions, repetitions, medians."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.bench.closed_loop import LoopOutcome, run_closed_loop
from loadtest.bench.completion import Completion, Failure
from loadtest.bench.workloads import Workload
from loadtest.stats.distribution import Distribution
from loadtest.target import Target


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
