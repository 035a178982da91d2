"""What a trace is like, in figures."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.stats.distribution import Distribution
from loadtest.trace import Trace


@dataclass(frozen=True, slots=True)
class Description:
    """Of a trace with at least one request.

    `span_s` is the time from the first arrival to the last, and `rate_rps` how many came per
    second of it (None if all came at once). `blocks` counts those of all prompts, `unique_blocks`
    the distinct ones. `ideal_hit_rate` is the share of the prompts' blocks that one cache would
    have which never forgets and has what came before at once; None for a trace without blocks.
    """

    requests: int
    span_s: float
    rate_rps: float | None
    prompt_tokens: Distribution
    output_tokens: Distribution
    blocks: int
    unique_blocks: int
    ideal_hit_rate: float | None


def describe(trace: Trace) -> Description:
    """Its figures; raises ValueError for a trace without requests."""
    prompts = Distribution.of(float(request.prompt_tokens) for request in trace.requests)
    outputs = Distribution.of(float(request.output_tokens) for request in trace.requests)
    if prompts is None or outputs is None:
        raise ValueError(f"{trace.name}: has no requests")
    span_s = trace.requests[-1].at_s - trace.requests[0].at_s
    seen: set[int] = set()
    blocks = hits = 0
    for request in trace.requests:
        blocks += len(request.blocks)
        for block in request.blocks:
            if block not in seen:
                break
            hits += 1
        seen.update(request.blocks)
    return Description(
        requests=len(trace.requests),
        span_s=span_s,
        rate_rps=len(trace.requests) / span_s if span_s > 0 else None,
        prompt_tokens=prompts,
        output_tokens=outputs,
        blocks=blocks,
        unique_blocks=len(seen),
        ideal_hit_rate=hits / blocks if blocks else None,
    )
