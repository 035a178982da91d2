"""How long a routing decision takes.

`python -m policies.bench_routing` prints p50 and p99 for each policy over 2, 8 and 64 candidates,
each with a standing of its own; with the same coefficients for all, and with different ones.
"""

from __future__ import annotations

import sys
import time
from random import Random

from policies.cost import Coefficients
from policies.routing import NOTHING_CACHED, Cached, Candidate, RouteRequest, Standing
from policies.routing_policies import BUILT_IN

_SEED = 7
_DECISIONS = 2000
_SETS = 50

LEARNED = Coefficients(
    constant_s=5e-3,
    token_s=225e-6,
    sequence_s=300e-6,
    attended_s=2e-9,
    context_read_s=1e-8,
    dram_latency_s=50e-6,
    dram_block_s=70e-6,
    redis_latency_s=1e-3,
    redis_block_s=400e-6,
    step_tokens=256,
    block_tokens=16,
)


def fleet(replicas: int, random: Random, *, alike: bool, tiers: bool) -> list[Candidate]:
    """Replicas at work, a quarter of which have some of the prompt; with `tiers`, every one of
    them finds half of it in Redis."""
    candidates = []
    for index in range(replicas):
        cost = LEARNED
        if not alike:
            cost = LEARNED._replace(token_s=LEARNED.token_s * random.uniform(0.9, 1.1))
        running = random.randint(0, 12)
        standing = Standing(
            pending_tokens=random.randint(0, 2000),
            waiting=random.randint(0, 3),
            running=running,
            context_tokens=running * random.randint(100, 1500),
        )
        cached = NOTHING_CACHED
        if tiers:
            cached = Cached(device=16 * random.randint(0, 32), redis=512)
        elif random.random() < 0.25:
            cached = Cached(device=16 * random.randint(1, 64))
        candidates.append(Candidate(f"replica-{index}", cost, standing, cached))
    return candidates


def decision_s(policy: str, replicas: int, *, alike: bool, tiers: bool) -> list[float]:
    """Sorted seconds of single decisions."""
    random = Random(_SEED)
    chooser = BUILT_IN[policy]()
    fleets = [fleet(replicas, random, alike=alike, tiers=tiers) for _ in range(_SETS)]
    request = RouteRequest(prompt_tokens=1088, max_tokens=32)
    seconds = []
    for turn in range(_DECISIONS):
        candidates = fleets[turn % _SETS]
        before = time.perf_counter()
        chooser.choose(request, candidates, random)
        seconds.append(time.perf_counter() - before)
    return sorted(seconds)


def main() -> int:
    """Print the table."""
    sys.stdout.write("policy           replicas  coefficients  tiers    p50 µs   p99 µs\n")
    for policy in BUILT_IN:
        for replicas in (2, 8, 64):
            for alike, tiers in ((True, False), (False, False), (False, True)):
                found = decision_s(policy, replicas, alike=alike, tiers=tiers)
                p50, p99 = found[len(found) // 2] * 1e6, found[len(found) * 99 // 100] * 1e6
                sys.stdout.write(
                    f"{policy:16} {replicas:8}  {'same' if alike else 'distinct':12}  "
                    f"{'redis' if tiers else 'device':6} {p50:8.1f} {p99:8.1f}\n"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
