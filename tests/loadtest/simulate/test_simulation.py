from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from loadtest.plan import TenantPlan
from loadtest.record import Outcome
from loadtest.simulate.ideal import ideal_hit_rate
from loadtest.simulate.result import as_json
from loadtest.simulate.simulation import Simulation, simulate
from loadtest.simulate.spec import SimSpec, Split
from loadtest.simulate.streams import StreamSet
from loadtest.summary import summarize
from loadtest.trace import Trace, TraceRequest
from policies.batching import Batching, BatchingMode
from policies.service_class import ServiceClass
from policies.slo import Slo
from tests.loadtest.simulate.fleets import BLOCK_TOKENS, alike, chains, constant_cost, spec_of

CLASSES = (
    TenantPlan("fast", service_class=ServiceClass.INTERACTIVE),
    TenantPlan("usual", weight=2.0),
    TenantPlan("slow", service_class=ServiceClass.BATCH),
)

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "crowded": {"device_tokens": 640, "replicas": 1},
    "DRAM": {"device_tokens": 800, "dram_tokens": 3200},
    "all tiers": {"device_tokens": 800, "dram_tokens": 640, "redis_tokens": 6400},
    "Redis": {"device_tokens": 800, "redis_tokens": 6400},
    "oracle": {"oracle": True},
    "more for prompts": {"split": Split(2, 1), "device_tokens": 800},
    "more for answers": {"split": Split(1, 2)},
    "static": {"batching": Batching(BatchingMode.STATIC, 4)},
    "dynamic": {"batching": Batching(BatchingMode.DYNAMIC, 4)},
    "admission": {"admission": True, "slo": Slo(ttft_s=0.3), "device_tokens": 800},
    "queue": {"admission": True, "slo": Slo(ttft_s=0.3, on_overload="queue")},
    "late news": {"report_delay_s": 0.2, "directory_delay_s": 0.5},
    "noise": {"noise": 0.1},
    "no cache": {"prompt_cache": False},
    "first come": {"fair": False},
    "many": {"replicas": 40, "shortlist": 4},
    "many by affinity": {"replicas": 40, "shortlist": 4, "policy": "prefix-affinity"},
    "many in turn": {"replicas": 40, "shortlist": 4, "policy": "round-robin"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_has_one_end_and_nothing_is_left_over(kind: str) -> None:
    trace = chains(70, per_s=25.0, tenants=CLASSES)
    spec = spec_of(**KINDS[kind])
    simulation = Simulation(trace, spec, lambda _: None)
    simulation.run()
    simulation.check_idle()
    result = simulation.result("", 0.0)
    records = list(result.run.records)
    assert [record.index for record in records] == list(range(70))
    assert {record.outcome for record in records} <= {
        Outcome.OK,
        Outcome.OVERLOADED,
        Outcome.REFUSED,
    }
    for record, request in zip(records, trace.requests, strict=True):
        assert record.sent_s == request.at_s
        assert record.tenant == request.tenant
        if record.ok:
            assert record.first_s is not None
            assert record.tiers is not None
            assert record.output_tokens == request.output_tokens
            assert request.at_s < record.first_s <= record.ended_s
            assert sum(record.tiers) == record.cached_tokens
            assert 0 <= sum(record.tiers) < request.prompt_tokens
            assert (record.first_s < record.ended_s) == (request.output_tokens > 1)
    assert sum(result.work.busy_s) <= result.simulated_s * spec.replicas * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["all tiers", "noise", "many", "queue", "more for prompts"])
def test_the_same_seed_gives_the_same_result(kind: str) -> None:
    trace = chains(50, per_s=25.0, tenants=CLASSES)

    def told() -> dict[str, Any]:
        figures = as_json(simulate(trace, spec_of(**KINDS[kind])))
        del figures["wall_s"]
        return figures

    assert told() == told()


def test_another_seed_gives_another_result() -> None:
    trace = chains(50, per_s=25.0)
    first, second = (simulate(trace, spec_of(policy="random", seed=seed)) for seed in (1, 2))
    assert [each.replica for each in first.run.records] != [
        each.replica for each in second.run.records
    ]


@pytest.mark.parametrize("changes", [{"replicas": 1, "device_tokens": 1 << 20}, {"oracle": True}])
def test_one_endless_cache_finds_what_is_ideal(changes: dict[str, Any]) -> None:
    # one after the other: who comes while a block is being computed waits for it, or computes it
    trace = chains(60, per_s=0.1)
    result = simulate(trace, spec_of(**changes))
    assert result.hit_rate == pytest.approx(ideal_hit_rate(trace))
    assert result.ideal_hit_rate > 0.2


def test_who_wants_what_is_being_computed_waits_for_it() -> None:
    blocks = list(range(20))
    requests = [TraceRequest(0.001 * at, 320, 2, [*blocks[:19], 100 + at]) for at in range(5)]
    result = simulate(Trace("together", BLOCK_TOKENS, requests), spec_of(replicas=1))
    found = [record.cached_tokens for record in result.run.records]
    assert found == [0, 304, 304, 304, 304]


def test_steps_of_streams_alone_are_the_same_together_and_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = chains(40, per_s=20.0)
    together = simulate(trace, spec_of(device_tokens=960))
    monkeypatch.setattr(StreamSet, "steps_left", lambda _: 1)
    one_by_one = simulate(trace, spec_of(device_tokens=960))
    assert together.work.steps == one_by_one.work.steps
    assert together.work.preemptions == one_by_one.work.preemptions
    for one, other in zip(together.run.records, one_by_one.run.records, strict=True):
        assert one.replica == other.replica
        assert one.first_s == pytest.approx(other.first_s, rel=1e-9)
        assert one.ended_s == pytest.approx(other.ended_s, rel=1e-9)


def test_a_lone_request_takes_what_the_cost_model_says() -> None:
    spec = spec_of(replicas=1)
    trace = Trace("one", BLOCK_TOKENS, [TraceRequest(3.0, 150, 11)])
    record = simulate(trace, spec).run.records[0]
    assert record.ttft_s == pytest.approx(spec.cost.prefill_s(150, 0))
    decode_s = sum(spec.cost.decode_step_s(1, 150 + token) for token in range(1, 11))
    assert record.e2e_s == pytest.approx(spec.cost.prefill_s(150, 0) + decode_s)


def test_what_is_found_in_lower_tiers_is_loaded_not_computed() -> None:
    # ten prompts of 40 blocks each, twice: the device holds two of them
    prompts = [[100 * number + block for block in range(40)] for number in range(10)]
    requests = [TraceRequest(5.0 * at, 640, 2, prompts[at % 10]) for at in range(20)]
    trace = Trace("rounds", BLOCK_TOKENS, requests)
    spec = {"replicas": 1, "device_tokens": 1600}
    without = simulate(trace, spec_of(**spec))
    dram = simulate(trace, spec_of(**spec, dram_tokens=8000))
    redis = simulate(trace, spec_of(**spec, dram_tokens=1600, redis_tokens=16_000))
    assert without.hit_rate == 0.0
    assert dram.hit_rate == 0.5
    assert as_json(dram)["hit_rate_tokens_by_tier"]["dram"] > 0.4
    assert as_json(redis)["hit_rate_tokens_by_tier"]["redis"] > 0.1
    second_round = [list(each.run.records)[10:] for each in (without, dram)]
    slow, fast = (max(each.ttft_s or 0.0 for each in records) for records in second_round)
    assert fast < slow / 3


def test_prompts_and_answers_on_replicas_of_their_own() -> None:
    trace = chains(60, per_s=30.0)
    split = simulate(trace, spec_of(split=Split(1, 2)))
    used = Counter(record.replica for record in split.run.records if record.output_tokens > 1)
    assert set(used) == {"r1", "r2"}
    assert {each.replica for each in split.run.records if each.output_tokens == 1} == {"r0"}


def test_prompts_do_not_hold_up_answers_that_are_generated_elsewhere() -> None:
    requests = [TraceRequest(0.0, 50, 80)]
    requests += [TraceRequest(0.1 + 0.05 * at, 300, 1) for at in range(40)]
    trace = Trace("one answer", BLOCK_TOKENS, requests)
    spec = {"replicas": 2, "device_tokens": 3200}
    moved = simulate(trace, spec_of(**spec, split=Split(1, 1))).run.records[0]
    stayed = simulate(trace, spec_of(**spec, policy="round-robin")).run.records[0]
    alone_s = spec_of().cost.decode_step_s(1, 130)
    assert moved.tpot_s == pytest.approx(alone_s, rel=0.02)
    assert (stayed.tpot_s or 0.0) > 1.2 * alone_s


def _of(tenant: str, requests: Iterable[Any]) -> list[Any]:
    return [each for each in requests if each.tenant == tenant]


@pytest.mark.parametrize(("fair", "low", "high"), [(True, 0.8, 1.25), (False, 2.5, 3.5)])
def test_flows_of_equal_weight_get_equal_shares_in_overload(
    fair: bool, low: float, high: float
) -> None:
    tenants = (TenantPlan("a"), TenantPlan("b"))
    requests = alike([0.02 * at for at in range(300)], prompt_tokens=20, output_tokens=10)
    requests = [
        each._replace(tenant="b" if at % 4 == 0 else "a") for at, each in enumerate(requests)
    ]
    spec = spec_of(replicas=1, cost=constant_cost(0.05), max_running=4, fair=fair)
    result = simulate(Trace("two", BLOCK_TOKENS, requests, tenants), spec)
    records = result.run.records
    # both have something waiting for as long as the last one comes
    told = as_json(result)["tenants"]
    assert {name: each["answered"] for name, each in told.items()} == {"a": 225, "b": 75}
    assert low < told["a"]["share_of_work"] / told["b"]["share_of_work"] < high
    served = Counter(record.tenant for record in records if record.ended_s < 6.0)
    assert low < served["a"] / served["b"] < high


def test_admission_keeps_the_promise_in_overload() -> None:
    # a service takes 0.1 s, and twice as many come as that allows
    requests = alike([0.05 * at for at in range(400)], output_tokens=2)
    trace = Trace("overload", BLOCK_TOKENS, requests, (TenantPlan("a", slo=Slo(ttft_s=0.5)),))
    spec = {"replicas": 1, "cost": constant_cost(0.05), "max_running": 1}
    free = as_json(simulate(trace, spec_of(**spec)))
    kept = simulate(trace, spec_of(**spec, admission=True))
    told = as_json(kept)
    assert free["rejected"] == 0
    assert free["attainment"] < 0.1
    assert told["goodput_rps"] > 0.8 * 10
    assert told["goodput_rps"] > 5 * free["goodput_rps"]
    assert told["rejected_by_reason"] == {"slo": told["rejected"]}
    late = [each for each in kept.run.records if each.ok and (each.ttft_s or 0.0) > 0.5]
    assert len(late) < 0.1 * told["answered"]


def test_who_may_wait_in_front_waits_and_is_refused_when_that_is_over() -> None:
    requests = alike([0.05 * at for at in range(100)], output_tokens=2)
    slo = Slo(ttft_s=0.5, on_overload="queue", max_queue_s=1.0)
    trace = Trace("overload", BLOCK_TOKENS, requests, (TenantPlan("a", slo=slo),))
    spec = spec_of(replicas=1, cost=constant_cost(0.05), max_running=1, admission=True)
    result = simulate(trace, spec)
    assert as_json(result)["queue"]["gate_queued"] > 10
    refused = [each for each in result.run.records if not each.ok]
    assert refused
    assert all(each.e2e_s == pytest.approx(1.0) for each in refused)


def test_with_static_batches_short_answers_wait_for_long_ones() -> None:
    requests = alike([0.01 * at for at in range(16)], output_tokens=5)
    requests[3] = requests[3]._replace(output_tokens=200)
    trace = Trace("mixed", BLOCK_TOKENS, requests, (TenantPlan("a"),))
    spec = {"replicas": 1, "cost": constant_cost(0.01)}
    static = Batching(BatchingMode.STATIC, 4)
    batched = simulate(trace, spec_of(**spec, batching=static)).run.records
    continuous = simulate(trace, spec_of(**spec)).run.records
    # the four that begin with the long one are followed by nobody until that has ended
    assert all(each.sent_s < 0.04 or (each.first_s or 0.0) > 2.0 for each in batched)
    assert max(each.ttft_s or 0.0 for each in continuous) < 0.2


def test_a_batch_is_of_those_who_waited_when_it_was_made() -> None:
    # a batch of two long ones, of which one step takes one; who comes meanwhile is more urgent
    tenants = (CLASSES[0], CLASSES[2])
    requests = alike([0.0, 0.001, 0.002, 0.003], prompt_tokens=60, tenant="slow")
    requests.append(TraceRequest(0.004, 60, 1, (), "fast"))
    trace = Trace("late", BLOCK_TOKENS, requests, tenants)
    batching = Batching(BatchingMode.DYNAMIC, 4, 1.0)
    records = simulate(trace, spec_of(replicas=1, batching=batching)).run.records
    assert max(each.ended_s for each in records[:4]) < (records[4].first_s or 0.0)
    assert (records[4].first_s or 0.0) > 1.0


def test_first_come_is_first_served_whatever_was_promised_and_however_late() -> None:
    tenants = (TenantPlan("a", slo=Slo(ttft_s=0.2)), TenantPlan("b", slo=Slo(ttft_s=2.0)))
    requests = [TraceRequest(0.01 * at, 20, 10, (), "b" if at % 3 else "a") for at in range(60)]
    trace = Trace("two", BLOCK_TOKENS, requests, tenants)
    spec = {"replicas": 1, "cost": constant_cost(0.05), "max_running": 2}

    def in_order(**changes: Any) -> bool:
        records = simulate(trace, spec_of(**spec, **changes)).run.records
        began_s = [each.first_s or 0.0 for each in records]
        return began_s == sorted(began_s)

    assert in_order(fair=False)
    assert not in_order()


def test_nobody_finds_more_than_one_endless_cache_would_of_those_who_were_let_in() -> None:
    blocks = list(range(6))
    too_long = TraceRequest(0.0, 96, 2000, blocks)
    requests = [too_long, *(TraceRequest(5.0 + at, 96, 2, blocks) for at in range(2))]
    result = simulate(Trace("long", BLOCK_TOKENS, requests), spec_of(replicas=1))
    assert result.ideal_hit_rate == result.hit_rate == 0.5
    trace = chains(80, per_s=200.0)
    spec = spec_of(oracle=True, admission=True, slo=Slo(ttft_s=0.3))
    overloaded = simulate(trace, spec)
    assert 0 < as_json(overloaded)["rejected"] < 60
    assert overloaded.hit_rate <= overloaded.ideal_hit_rate


def test_only_waiting_at_replicas_is_time_in_line() -> None:
    requests = alike([0.0, 10.0], prompt_tokens=600, output_tokens=3)
    trace = Trace("apart", BLOCK_TOKENS, requests, (TenantPlan("a"),))
    assert simulate(trace, spec_of(replicas=2, split=Split(1, 1))).work.line_s == 0.0
    assert simulate(trace, spec_of(replicas=1)).work.line_s == 0.0


def test_an_answer_of_nothing_is_one_of_one_token() -> None:
    records = simulate(Trace("none", BLOCK_TOKENS, [TraceRequest(0.0, 20, 0)]), spec_of())
    assert [each.output_tokens for each in records.run.records] == [1]


def test_what_cannot_be_simulated_is_refused() -> None:
    spec = spec_of()
    late = Trace("late", BLOCK_TOKENS, [TraceRequest(2.0, 5, 5), TraceRequest(1.0, 5, 5)])
    with pytest.raises(ValueError, match="request 1 came before"):
        simulate(late, spec)
    with pytest.raises(ValueError, match="nobody"):
        simulate(Trace("whose", BLOCK_TOKENS, [TraceRequest(0.0, 5, 5, (), "nobody")]), spec)
    with pytest.raises(ValueError, match="no prompt"):
        simulate(Trace("empty", BLOCK_TOKENS, [TraceRequest(0.0, 0, 5)]), spec)
    with pytest.raises(ValueError, match="more blocks"):
        simulate(Trace("full", BLOCK_TOKENS, [TraceRequest(0.0, 16, 5, (1, 2))]), spec)
    with pytest.raises(ValueError, match="two blocks"):
        simulate(Trace("coarse", 1024, [TraceRequest(0.0, 5, 5)]), spec)


def test_what_no_replica_can_hold_is_refused() -> None:
    requests = [TraceRequest(0.0, 1590, 50), TraceRequest(0.0, 100, 5)]
    records = simulate(Trace("long", BLOCK_TOKENS, requests), spec_of()).run.records
    assert [each.outcome for each in records] == [Outcome.REFUSED, Outcome.OK]
    assert records[0].reason == "longer than the cache"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"policy": "best"}, "policy is one of"),
        ({"replicas": 0}, "replicas"),
        ({"dram_tokens": -1}, "dram_tokens"),
        ({"max_running": 65}, "do not fit a step"),
        ({"split": Split(1, 1)}, "no split"),
        ({"batching": Batching(BatchingMode.STATIC, 9)}, "batch of 9"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        spec_of(**changes)


def test_the_fleet_is_seen_over_time() -> None:
    result = simulate(chains(60, per_s=20.0), spec_of(replicas=1))
    timeline = result.run.timeline
    assert 30 <= len(timeline) <= 60
    assert max(sample.running or 0 for sample in timeline) == 8
    assert max(sample.waiting or 0 for sample in timeline) > 0
    prompt_tokens = [sample.prompt_tokens or 0 for sample in timeline]
    assert prompt_tokens == sorted(prompt_tokens)
    assert 0 < prompt_tokens[-1] < sum(each.prompt_tokens for each in result.run.records)


def test_an_empty_trace_has_no_figures() -> None:
    told = as_json(simulate(Trace("none", BLOCK_TOKENS, []), spec_of()))
    assert told["requests"] == 0
    assert told["ttft_ms"] is None
    assert told["goodput_rps"] == 0.0


def test_a_slo_of_the_spec_is_in_place_of_the_tenants() -> None:
    spec: SimSpec = spec_of(slo=Slo(ttft_s=7.0))
    result = simulate(chains(3, per_s=1.0, tenants=CLASSES), spec)
    assert [tenant.slo.ttft_s for tenant in result.run.tenants] == [7.0, 7.0, 7.0]
    assert [tenant.weight for tenant in result.run.tenants] == [1.0, 2.0, 1.0]


def test_attainment_is_of_those_who_were_promised_something() -> None:
    tenants = (TenantPlan("promised", slo=Slo(ttft_s=1e-9)), TenantPlan("free"))
    found = simulate(chains(60, per_s=20, tenants=tenants), spec_of())
    figures = as_json(found)
    whole = summarize(found.run).whole
    assert 0 < figures["tenants"]["promised"]["requests"] < figures["requests"]
    assert figures["attainment"] == whole.attainment == 0.0
    assert figures["goodput_rps"] == pytest.approx(whole.goodput_rps)
    assert figures["goodput_rps"] > 0  # who was promised nothing has got what there was to get
