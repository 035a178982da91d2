"""What policies lead to: fleets in simulated time."""

from collections.abc import Sequence
from functools import cache
from random import Random
from statistics import fmean

import pytest

from policies.routing import Candidate, RouteRequest, RoutingPolicy
from policies.routing_policies import BUILT_IN
from tests.policies.fleet_simulation import (
    BUNDLED,
    Outcome,
    SimulatedReplica,
    Visit,
    poisson,
    simulate,
)

PREFIXES = 12
LOW_PER_S, HIGH_PER_S = 4.0, 28.0
"""Two replicas that have to compute nothing but tails do about 38 requests a second, those that
find half of the prefixes about 13."""
SEEDS = range(1, 7)


class Pinned:
    """Every prefix has its replica: nothing is ever computed twice."""

    def __init__(self, visits: Sequence[Visit]) -> None:
        self._prefixes = iter([visit.prefix for visit in visits])

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate], random: Random) -> int:
        return next(self._prefixes) % len(candidates)


def fleet(count: int, prefixes: int) -> list[SimulatedReplica]:
    return [SimulatedReplica(f"replica-{index}", BUNDLED, prefixes) for index in range(count)]


@cache
def half_fits(policy: str, per_s: float, seed: int = 1) -> Outcome:
    """Two replicas, each with room for half of the prefixes."""
    visits = poisson(Random(seed), requests=500, per_s=per_s, prefixes=PREFIXES)
    chooser: RoutingPolicy = Pinned(visits) if policy == "pinned" else BUILT_IN[policy]()
    return simulate(chooser, fleet(2, PREFIXES // 2), visits, Random(seed), warm_up=150)


@pytest.mark.parametrize("per_s", [LOW_PER_S, HIGH_PER_S])
def test_prefixes_stay_where_they_are_warm(per_s: float) -> None:
    lost = [
        half_fits("pinned", per_s, seed).hit_rate
        - half_fits("predicted-ttft", per_s, seed).hit_rate
        for seed in SEEDS
    ]
    assert fmean(lost) <= 0.03  # a single course of chance can lose a block of requests
    found = half_fits("predicted-ttft", per_s)
    for blind in ("round-robin", "random"):
        other = half_fits(blind, per_s)
        assert other.hit_rate < 0.65
        assert other.ttft_p50_s >= 2 * found.ttft_p50_s
        assert other.ttft_p95_s >= 1.5 * found.ttft_p95_s
        assert found.requests_per_s >= 0.99 * other.requests_per_s


@pytest.mark.parametrize("clients", [1, 24])
def test_clients_that_wait_for_their_answers_find_it_warm(clients: int) -> None:
    outcomes = {}
    for policy in ("predicted-ttft", "round-robin"):
        visits = poisson(Random(2), requests=500, per_s=1e9, prefixes=PREFIXES)
        replicas = fleet(2, PREFIXES // 2)
        outcomes[policy] = simulate(
            BUILT_IN[policy](), replicas, visits, Random(2), clients=clients, warm_up=150
        )
    found, blind = outcomes["predicted-ttft"], outcomes["round-robin"]
    assert found.hit_rate >= 0.97
    assert blind.ttft_p50_s >= 2 * found.ttft_p50_s
    assert blind.ttft_p95_s >= 1.5 * found.ttft_p95_s
    assert found.requests_per_s >= 1.2 * blind.requests_per_s
    assert 0.35 <= found.share_of(0) <= 0.65


@pytest.mark.parametrize("room", [1, 6])
def test_a_hot_prefix_does_not_pile_up(room: int) -> None:
    """With `room` for one prefix the caches are full and nothing is known of what a copy costs."""
    visits = poisson(Random(3), requests=600, per_s=60.0, prefixes=1)
    found = simulate(BUILT_IN["predicted-ttft"](), fleet(4, room), visits, Random(3), warm_up=150)
    assert max(found.share_of(index) for index in range(4)) <= 0.4
    assert found.ttft_p95_s < 0.25  # less than one computing
    assert found.hit_rate >= 0.99


def test_one_client_does_not_fill_one_replica_with_all_prefixes() -> None:
    visits = poisson(Random(4), requests=40, per_s=1e9, prefixes=10**9)  # no prefix twice
    found = simulate(BUILT_IN["predicted-ttft"](), fleet(4, 100), visits, Random(4), clients=1)
    assert found.hit_rate == 0.0
    assert all(0.1 <= found.share_of(index) <= 0.45 for index in range(4))
