"""What theory says of queues, the simulator says too."""

from __future__ import annotations

from random import Random

import pytest

from loadtest.plan import TenantPlan
from loadtest.simulate.result import SimResult
from loadtest.simulate.simulation import simulate
from loadtest.stats.queueing import md1_wait_s, mm1_wait_s
from loadtest.trace import Trace, TraceRequest
from tests.loadtest.simulate.fleets import constant_cost, spec_of

REQUESTS = 4000
SERVICE_S = 0.1


def run(answers: list[int], per_s: float, step_s: float) -> SimResult:
    """One server, to which requests come at random."""
    random = Random(6)
    at_s, requests = 0.0, []
    for tokens in answers:
        at_s += random.expovariate(per_s)
        requests.append(TraceRequest(at_s, 1, tokens, (), "a"))
    trace = Trace("poisson", 16, requests, (TenantPlan("a"),))
    spec = spec_of(replicas=1, max_running=1, cost=constant_cost(step_s), prompt_cache=False)
    return simulate(trace, spec)


def mean_wait_s(result: SimResult, services_s: list[float]) -> float:
    """Of these very arrivals: who comes waits for as long as the one before waited and was served,
    less what has passed since (Lindley, 1952)."""
    arrived_s = [record.sent_s for record in result.run.records]
    wait_s = total_s = 0.0
    for before, after, service_s in zip(arrived_s, arrived_s[1:], services_s, strict=False):
        wait_s = max(0.0, wait_s + service_s - (after - before))
        total_s += wait_s
    return total_s / len(arrived_s)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_equal_services_wait_as_in_an_m_d_1_queue(load: float) -> None:
    result = run([1] * REQUESTS, load / SERVICE_S, SERVICE_S)
    waited_s = result.work.line_s / REQUESTS
    assert waited_s == pytest.approx(md1_wait_s(load / SERVICE_S, SERVICE_S), rel=0.12)
    assert waited_s == pytest.approx(mean_wait_s(result, [SERVICE_S] * REQUESTS))
    busy = result.work.busy_s[0] / result.simulated_s
    assert busy == pytest.approx(load, rel=0.05)


def test_exponential_services_wait_as_in_an_m_m_1_queue() -> None:
    random = Random(5)
    tokens = 50
    answers = [max(1, round(random.expovariate(1 / tokens))) for _ in range(REQUESTS)]
    result = run(answers, 0.5 / SERVICE_S, SERVICE_S / tokens)
    waited_s = result.work.line_s / REQUESTS
    assert waited_s == pytest.approx(mm1_wait_s(0.5 / SERVICE_S, SERVICE_S), rel=0.12)
    services_s = [SERVICE_S / tokens * each for each in answers]
    assert waited_s == pytest.approx(mean_wait_s(result, services_s))
