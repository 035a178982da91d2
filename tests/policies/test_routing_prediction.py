"""What a prediction is made of."""

from dataclasses import replace

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


FLAT = COST._replace(attended_s=0.0, context_read_s=0.0)


def test_another_flow_takes_no_more_than_its_share_while_one_waits() -> None:
    # of 40,000 tokens of others', those who weigh twice as much compute twice what it does: half
    # of its own, as its turn may come at once or after all of it
    crowd = Standing(40_000, 40, queued=(Queued(1, 40, 40_000, b"big", 2.0),))
    ask = RouteRequest(1000, 32, 1, b"small", 1.0)
    assert predicted(crowd, request=ask, cost=FLAT).queue_s == pytest.approx(
        predicted(Standing(1000, 1), request=ask, cost=FLAT).queue_s
    )
    # and of its own it computes all that was there before
    queued = (*crowd.queued, Queued(1, 3, 3000, b"small", 1.0))
    more = Standing(43_000, 43, queued=queued)
    assert predicted(more, request=ask, cost=FLAT).queue_s == pytest.approx(
        predicted(Standing(3000 + 2 * 3500, 10), request=ask, cost=FLAT).queue_s
    )
    # who has less than its share has all of it done
    little = Standing(500, 1, queued=(Queued(1, 1, 500, b"other", 2.0),))  # a share of 1,000
    assert predicted(little, request=ask) == predicted(Standing(500, 1), request=ask)


def test_what_comes_of_another_flow_meanwhile_is_in_front_as_far_as_its_share_goes() -> None:
    ask = RouteRequest(1000, 32, 1, b"small", 1.0)

    def queue_s(per_s: float, weight: float = 4.0) -> float:
        other = Queued(1, 1, 500, b"other", weight, per_s)  # a share of 500 for each unit of weight
        return predicted(Standing(500, 1, queued=(other,)), request=ask, cost=FLAT).queue_s

    def behind_s(tokens: float, sequences: float) -> float:
        return predicted(Standing(tokens, sequences), request=ask, cost=FLAT).queue_s

    assert queue_s(0.0) == behind_s(500, 1)
    # more than it is due does not help it, and nothing is due to who has had his share already
    assert queue_s(1e6) == pytest.approx(behind_s(2000, 2))
    assert queue_s(1e6, weight=1.0) == queue_s(0.0, weight=1.0)
    # what comes is what comes until that is worked off, too
    wait_s = queue_s(500.0)
    assert queue_s(0.0) < wait_s < queue_s(1e6)
    come = 500.0 * wait_s
    assert wait_s == pytest.approx(behind_s(500 + come, 1 + come / 500), rel=0.02)


def test_who_is_more_urgent_gives_up_nothing_to_shares() -> None:
    crowd = Standing(9000, 9, queued=(Queued(0, 9, 9000, b"urgent", 1.0),))
    ask = RouteRequest(100, 32, 1, b"small", 5.0)
    assert predicted(crowd, request=ask) == predicted(Standing(9000, 9), request=ask)


def test_the_urgent_take_the_slots_of_who_yields() -> None:
    full = Standing(running=16, max_running=16, answer_tokens=170, yielding=((1, 4), (2, 12)))
    held = predicted(full, request=RouteRequest(1088, 32, 2))
    assert held == predicted(full._replace(yielding=()))
    assert predicted(full, request=RouteRequest(1088, 32, 1)).queue_s < held.queue_s
    three = full._replace(waiting=3, queued=(Queued(0, 3, 0),))
    assert predicted(three, request=RouteRequest(1088, 32, 1)).queue_s == pytest.approx(
        0.5 * (STEP_S + 16 * ROW_S)
    )


flows = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([b"a", b"b", b"c"]),
        st.integers(1, 9),
        st.integers(0, 5000),
    ),
    max_size=9,
    unique_by=lambda each: each[:2],
)
WEIGHTS = {b"a": 1.0, b"b": 2.0, b"c": 0.5}


def standing_of(queued: list[tuple[int, bytes, int, int]], unknown_tokens: int = 0) -> Standing:
    return Standing(
        pending_tokens=unknown_tokens + sum(tokens for *_, tokens in queued),
        waiting=sum(sequences for _, _, sequences, _ in queued) + bool(unknown_tokens),
        queued=tuple(
            Queued(priority, sequences, tokens, flow, WEIGHTS[flow])
            for priority, flow, sequences, tokens in queued
        ),
    )


@given(flows, st.integers(0, 2), st.sampled_from([b"a", b"b", b"new"]), st.integers(0, 3000))
@settings(max_examples=60, deadline=None)
def test_what_is_in_front_is_what_shares_allow(queued, priority, flow, unknown) -> None:
    weight = WEIGHTS.get(flow, 1.0)
    ask = RouteRequest(700, 32, priority, flow, weight)
    own = [each for each in queued if each[:2] == (priority, flow)]
    own_tokens = 350 + sum(tokens for *_, tokens in own)
    own_sequences = 0.5 + sum(sequences for _, _, sequences, _ in own)
    ahead, waiting = float(unknown), float(bool(unknown))
    for its_priority, its_flow, sequences, tokens in queued:
        if its_priority < priority or (its_priority, its_flow) == (priority, flow):
            ahead, waiting = ahead + tokens, waiting + sequences
        elif its_priority == priority:
            share = WEIGHTS[its_flow] / weight
            ahead += min(tokens, own_tokens * share)
            waiting += min(sequences, own_sequences * share)
    standing = standing_of(queued, unknown)
    found = predicted(standing, request=ask).queue_s
    if standing.pending_tokens or standing.waiting:
        plain = Standing(ahead, waiting)._replace(running=0)
        expected = predicted(plain, request=ask).queue_s
        if ahead or waiting:
            assert found == pytest.approx(expected)
    # a larger weight never has to wait for longer
    light, heavy = (
        predicted(standing, request=replace(ask, weight=own), cost=FLAT).queue_s
        for own in (weight, 3 * weight)
    )
    assert heavy <= light + 1e-9


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
