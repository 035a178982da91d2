"""What a prediction is made of."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cost import Coefficients, CostModel
from policies.routing import NOTHING_CACHED, Cached, Candidate, Queued, RouteRequest, Standing
from policies.routing_prediction import predict, predicted_terms
from policies.tiering import choose_load
from tests.policies.fleet_simulation import BUNDLED

COST = BUNDLED._replace(attended_s=20e-9, context_read_s=100e-9)
IDLE = Standing()
PROMPT = RouteRequest(1088, 32)
STEP_S = COST.constant_s + COST.sequence_s
ROW_S = COST.token_s + COST.sequence_s


def predicted(
    standing: Standing = IDLE,
    cached: Cached = NOTHING_CACHED,
    request: RouteRequest = PROMPT,
    cost: Coefficients = COST,
):
    return predict(request, Candidate("a", cost, standing, cached))


@given(prompt=st.integers(1, 9000), cached=st.integers(0, 9000))
@settings(max_examples=60, deadline=None)
def test_an_idle_replica_takes_what_its_cost_model_says(prompt: int, cached: int) -> None:
    found = predicted(cached=Cached(device=cached), request=RouteRequest(prompt))
    uncached = max(1, prompt - cached)
    assert found.queue_s == 0.0
    assert found.load_s == 0.0
    assert found.prefill_s == pytest.approx(COST.prefill_s(uncached, prompt - uncached))


def test_what_decodes_goes_on_in_every_step_of_the_prefill() -> None:
    alone = predicted().prefill_s
    # 10 rows leave 246 tokens of each step: 1,088 tokens still take five
    beside = predicted(Standing(running=10, context_tokens=5000)).prefill_s
    rows_s = 10 * ROW_S + 5000 * (COST.attended_s + COST.context_read_s)
    assert beside == pytest.approx(alone + 5 * rows_s)
    # 40 leave 216, which makes it six
    more = predicted(Standing(running=40, max_running=64)).prefill_s
    assert more == pytest.approx(alone + 5 * 40 * ROW_S + STEP_S + 40 * ROW_S)


def test_a_running_step_is_half_over() -> None:
    assert predicted(Standing(running=4)).queue_s == pytest.approx(0.5 * (STEP_S + 4 * ROW_S))
    found = predicted(Standing(pending_tokens=100, waiting=1))
    assert found.queue_s == pytest.approx(0.5 * (STEP_S + 100 * COST.token_s))


def test_pending_tokens_are_computed_first() -> None:
    flat = COST._replace(attended_s=0.0, context_read_s=0.0)
    two, four = (
        predicted(Standing(pending_tokens=256 * steps, waiting=1), cost=flat).queue_s
        for steps in (2, 4)
    )
    assert four - two == pytest.approx(2 * (STEP_S + 256 * COST.token_s))
    # the longer the prompts among them are, the longer that takes
    few = predicted(Standing(pending_tokens=4096, waiting=1)).queue_s
    many = predicted(Standing(pending_tokens=4096, waiting=8)).queue_s
    assert few > many


def test_without_a_slot_it_waits_for_answers_to_end() -> None:
    full = Standing(running=16, max_running=16, answer_tokens=170)
    step_s = STEP_S + 16 * ROW_S
    assert predicted(full).queue_s == pytest.approx(0.5 * step_s + 170 / 17 * step_s)
    behind_three = full._replace(waiting=3)
    assert predicted(behind_three).queue_s == pytest.approx(0.5 * step_s + 4 * 170 / 17 * step_s)
    unknown = full._replace(answer_tokens=0)
    assert predicted(unknown).queue_s == pytest.approx(0.5 * step_s + 32 / 17 * step_s)
    assert predicted(full._replace(running=15)).queue_s == pytest.approx(
        0.5 * (STEP_S + 15 * ROW_S)
    )


def test_prefills_go_on_while_it_waits_for_a_slot() -> None:
    flat = COST._replace(attended_s=0.0, context_read_s=0.0)
    slots = Standing(running=16, max_running=16, answer_tokens=170)
    both = predicted(slots._replace(pending_tokens=240 * 5, waiting=1), cost=flat).queue_s
    step_s = STEP_S + 16 * ROW_S
    # 20 steps until the second slot is free, of which the pending tokens lengthen the first
    under_way_s = 0.5 * (step_s + 240 * COST.token_s)
    assert both == pytest.approx(under_way_s + 20 * step_s + 960 * COST.token_s)


def test_the_urgent_overtakes_what_waits_and_is_less_urgent() -> None:
    crowd = Standing(pending_tokens=5000, waiting=6, queued=(Queued(0, 1, 800), Queued(2, 5, 4200)))
    urgent = predicted(crowd, request=RouteRequest(1088, 32, priority=0)).queue_s
    assert urgent == predicted(Standing(pending_tokens=800, waiting=1)).queue_s
    equal = predicted(crowd, request=RouteRequest(1088, 32, priority=2)).queue_s
    assert equal == predicted(Standing(pending_tokens=5000, waiting=6)).queue_s


def test_loading_is_predicted_where_it_is_faster_than_computing() -> None:
    found = predicted(cached=Cached(device=256, dram=256, redis=512))
    assert found.load_s == pytest.approx(COST.load_s(256, 512))
    assert found.prefill_s == pytest.approx(COST.prefill_s(64, 1024))
    slow = COST._replace(redis_block_s=20e-3)
    partly = predicted(cached=Cached(device=256, dram=256, redis=512), cost=slow)
    assert partly.load_s == pytest.approx(slow.load_s(256, 0))
    assert partly.prefill_s == pytest.approx(slow.prefill_s(576, 512))


@given(
    device=st.integers(0, 40),
    dram=st.integers(0, 40),
    redis=st.integers(0, 40),
    own=st.integers(1, 300),
    redis_block_s=st.floats(1e-4, 2e-2),
)
@settings(max_examples=60, deadline=None)
def test_the_engine_loads_what_was_predicted(
    device: int, dram: int, redis: int, own: int, redis_block_s: float
) -> None:
    model = CostModel(
        token_flops=0.05e9, weight_bytes=269e6, kv_token_bytes=23040, block_bytes=368640
    )
    for blocks in (0, 64, 1, 32) * 5:
        model.observe_load("redis", blocks, 1e-3 + blocks * redis_block_s)
    cost = model.coefficients(256, 16)
    prompt = 16 * (device + dram + redis) + own
    runs = [(tier, blocks) for tier, blocks in (("dram", dram), ("redis", redis)) if blocks]
    count = choose_load(runs, start_block=device, block_tokens=16, prompt_tokens=prompt, cost=model)
    loaded = dict(runs[:count])
    found = predicted(
        cached=Cached(16 * device, 16 * dram, 16 * redis),
        request=RouteRequest(prompt),
        cost=cost,
    )
    expected_s = cost.load_s(16 * loaded.get("dram", 0), 16 * loaded.get("redis", 0))
    assert found.load_s == pytest.approx(expected_s)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_many_are_predicted_as_each_alone(data: st.DataObject) -> None:
    costs = [COST, COST._replace(token_s=1e-4, step_tokens=512)]
    whole = st.integers(0, 3000)
    candidates = [
        Candidate(
            str(index),
            data.draw(st.sampled_from(costs)),
            Standing(
                pending_tokens=data.draw(whole),
                waiting=data.draw(st.integers(0, 20)),
                running=data.draw(st.integers(0, 300)),
                context_tokens=data.draw(whole),
            ),
            Cached(*(16 * data.draw(st.integers(0, 30)) for _ in range(3))),
        )
        for index in range(data.draw(st.integers(1, 6)))
    ]
    request = RouteRequest(data.draw(st.integers(1, 3000)), 32)
    alone = [tuple(predict(request, candidate)) for candidate in candidates]
    assert predicted_terms(request, candidates) == alone
    assert all(term >= 0.0 for terms in alone for term in terms)
