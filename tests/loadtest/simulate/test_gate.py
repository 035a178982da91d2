"""Those who wait in front of the fleet."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.plan import TenantPlan
from loadtest.simulate.result import SimResult
from loadtest.simulate.simulation import simulate
from loadtest.trace import Trace, TraceRequest
from policies.service_class import ServiceClass
from policies.slo import Slo
from tests.loadtest.simulate.fleets import BLOCK_TOKENS, alike, constant_cost, spec_of

WAITS = Slo(ttft_s=0.2, on_overload="queue", max_queue_s=30.0)
LONG = constant_cost(0.05)._replace(step_tokens=1 << 20, attended_s=1e-30, token_s=1e-30)
SPEC: dict[str, Any] = {"replicas": 1, "cost": constant_cost(0.05), "admission": True}


def run(requests: list[TraceRequest], *tenants: TenantPlan, **changes: Any) -> SimResult:
    return simulate(Trace("gate", BLOCK_TOKENS, requests, tenants), spec_of(**SPEC | changes))


def test_those_who_wait_go_on_one_soon_after_the_other() -> None:
    # one that takes two seconds in the only slot, and then room for all
    requests = [*alike([0.0], output_tokens=40), *alike([0.01] * 8)]
    records = list(run(requests, TenantPlan("a", slo=WAITS), max_running=1).run.records)
    began_s = sorted(each.first_s or 0.0 for each in records[1:])
    assert began_s[0] == pytest.approx(2.05)
    assert began_s[-1] == pytest.approx(2.4)  # each takes a step, and none waits for more


def test_more_prompts_than_there_is_room_for_do_not_wait() -> None:
    # a million tokens each: four of them may wait
    requests = alike([0.0, *[0.01] * 6], prompt_tokens=1 << 20, output_tokens=20)
    result = run(
        requests,
        TenantPlan("a", slo=WAITS),
        max_running=1,
        cost=LONG,
        device_tokens=1 << 24,
        prompt_cache=False,
    )
    outcomes = [each.ok for each in result.run.records]
    assert outcomes == [True] * 5 + [False] * 2
    assert all(each.ended_s == 0.01 for each in result.run.records if not each.ok)


def test_who_is_less_urgent_goes_for_who_is_more_so() -> None:
    tenants = (
        TenantPlan("a", slo=WAITS, service_class=ServiceClass.BATCH),
        TenantPlan("b", slo=WAITS, service_class=ServiceClass.STANDARD),
    )
    requests = alike([0.0, *[0.01] * 4], prompt_tokens=1 << 20, output_tokens=20)
    requests += alike([0.02], prompt_tokens=1 << 20, output_tokens=20, tenant="b")
    requests[0] = requests[0]._replace(tenant="b")
    result = run(
        requests, *tenants, max_running=1, cost=LONG, device_tokens=1 << 24, prompt_cache=False
    )
    records = list(result.run.records)
    assert [each.ok for each in records].count(False) == 1
    displaced = next(each for each in records if not each.ok)
    assert (displaced.tenant, displaced.reason, displaced.ended_s) == ("a", "places", 0.02)
    assert records[-1].ok


def test_nobody_waits_whose_tenant_lets_nobody_wait() -> None:
    slo = Slo(ttft_s=0.2, on_overload="queue", max_queue_s=0.0)
    records = run(alike([0.0] * 12, output_tokens=20), TenantPlan("a", slo=slo), max_running=1)
    refused = [each for each in records.run.records if not each.ok]
    assert refused
    assert all(each.e2e_s == 0.0 for each in refused)


def test_those_who_wait_are_not_looked_at_before_it_is_heard_that_there_is_room() -> None:
    requests = alike([0.0, 0.01], output_tokens=40)
    slow = run(requests, TenantPlan("a", slo=WAITS), max_running=1, report_delay_s=0.5)
    second = slow.run.records[1]
    assert second.first_s is not None
    assert second.first_s > 2.5
