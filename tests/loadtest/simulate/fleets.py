"""Small fleets and traces for the simulator's tests."""

from __future__ import annotations

from random import Random
from typing import Any

from loadtest.plan import TenantPlan
from loadtest.simulate.spec import SimSpec
from loadtest.trace import Trace, TraceRequest
from policies.cost import Coefficients

BLOCK_TOKENS = 16
NOTHING_S = 1e-12
"""What costs nothing: the cost model wants every coefficient to be positive."""

FAST = Coefficients(
    constant_s=0.02,
    token_s=1e-4,
    sequence_s=1e-5,
    attended_s=1e-8,
    context_read_s=1e-7,
    dram_latency_s=1e-5,
    dram_block_s=1e-5,
    redis_latency_s=1e-5,
    redis_block_s=2e-5,
    step_tokens=64,
    block_tokens=BLOCK_TOKENS,
)


def constant_cost(step_s: float) -> Coefficients:
    """Every step takes so long, whatever is in it."""
    return FAST._replace(
        constant_s=step_s,
        token_s=NOTHING_S,
        sequence_s=NOTHING_S,
        attended_s=NOTHING_S,
        context_read_s=NOTHING_S,
        step_tokens=4096,
    )


def spec_of(**changes: Any) -> SimSpec:
    """Three small replicas with a hundred blocks each, unless said otherwise."""
    small: dict[str, Any] = {
        "cost": FAST,
        "device_tokens": 1600,
        "max_running": 8,
        "replicas": 3,
    }
    return SimSpec(**small | changes)


def chains(
    requests: int, *, per_s: float, seed: int = 0, tenants: tuple[TenantPlan, ...] = (TenantPlan(),)
) -> Trace:
    """Prompts of up to twelve new blocks behind what an earlier one had, in part; Poisson arrivals,
    answers from 1 to 80 tokens."""
    random = Random(seed)
    made: list[TraceRequest] = []
    known: list[list[int]] = [[]]
    at_s, next_block = 0.0, 0
    for _ in range(requests):
        at_s += random.expovariate(per_s)
        before = random.choice(known)
        blocks = before[: random.randint(0, len(before))]
        new = random.randint(1, 12)
        blocks = [*blocks, *range(next_block, next_block + new)]
        next_block += new
        prompt_tokens = len(blocks) * BLOCK_TOKENS - random.randint(0, BLOCK_TOKENS - 1)
        answer = random.choice((1, 2, 5, 30, 80))
        shared = random.random() > 0.05
        tenant = random.choice(tenants).name
        made.append(TraceRequest(at_s, prompt_tokens, answer, blocks if shared else (), tenant))
        known.append(blocks[:-1])  # the last one may be filled only in part
    return Trace("chains", BLOCK_TOKENS, made, tenants)


def alike(
    times_s: list[float], *, prompt_tokens: int = 1, output_tokens: int = 1, tenant: str = "a"
) -> list[TraceRequest]:
    """Requests without anything in common, but of equal lengths."""
    return [TraceRequest(at_s, prompt_tokens, output_tokens, (), tenant) for at_s in times_s]
