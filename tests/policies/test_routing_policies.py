"""Who is chosen, one decision at a time."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.routing import NOTHING_CACHED, Cached, Candidate, Queued, RouteRequest, Standing
from policies.routing_policies import BUILT_IN, PrefixAffinity, RoundRobin
from policies.routing_prediction import predict
from policies.routing_ttft import PredictedTtft
from tests.policies.fleet_simulation import BUNDLED

PROMPT = RouteRequest(1088, 32)
WARM = Cached(device=1024)
IDLE = Standing()


def replica(
    name: str = "a", standing: Standing = IDLE, cached: Cached = NOTHING_CACHED, cost=BUNDLED
) -> Candidate:
    return Candidate(name, cost, standing, cached)


def idle(count: int) -> list[Candidate]:
    return [replica(f"replica-{index}") for index in range(count)]


def counts(policy, candidates, draws: int, seed: int = 1) -> Counter[int]:
    random = Random(seed)
    return Counter(policy.choose(PROMPT, candidates, random) for _ in range(draws))


def is_even(found: Counter[int], kinds: int) -> bool:
    """Pearson's chi-square within four standard deviations of its mean, `kinds - 1`."""
    expected = sum(found.values()) / kinds
    square = sum((found[index] - expected) ** 2 / expected for index in range(kinds))
    return square <= (kinds - 1) + 4 * (2 * (kinds - 1)) ** 0.5


@pytest.mark.parametrize("name", BUILT_IN)
def test_equal_replicas_are_chosen_evenly(name: str) -> None:
    assert is_even(counts(BUILT_IN[name](), idle(8), 2000), 8)


@pytest.mark.parametrize("name", BUILT_IN)
def test_several_gateways_do_not_begin_at_the_same_replica(name: str) -> None:
    first = Counter(BUILT_IN[name]().choose(PROMPT, idle(8), Random(seed)) for seed in range(800))
    assert is_even(first, 8)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_full_replica_is_passed_by_unless_all_are(name: str) -> None:
    full = Standing(full=True)
    candidates = [replica("a", full, WARM), replica("b", Standing(waiting=9)), replica("c", full)]
    assert set(counts(BUILT_IN[name](), candidates, 50)) == {1}
    candidates = [replica("a", full), replica("b", full)]
    assert set(counts(BUILT_IN[name](), candidates, 50)) == {0, 1}


@pytest.mark.parametrize("name", BUILT_IN)
def test_one_candidate_is_the_choice(name: str) -> None:
    only = [replica("a", Standing(pending_tokens=9000, waiting=9, running=16))]
    assert set(counts(BUILT_IN[name](), only, 5)) == {0}


def test_cold_prompts_are_spread_over_replicas_that_have_learned_different_costs() -> None:
    random = Random(3)
    candidates = [
        replica(str(index), cost=BUNDLED._replace(token_s=225e-6 * random.uniform(0.97, 1.03)))
        for index in range(8)
    ]
    assert is_even(counts(PredictedTtft(), candidates, 2000), 8)


def test_a_short_beginning_that_all_prompts_share_does_not_draw_all_prompts() -> None:
    candidates = [replica("a", cached=Cached(device=32)), *idle(3)]
    assert is_even(counts(PredictedTtft(), candidates, 2000), 4)


def test_a_replica_that_is_clearly_faster_is_taken_while_it_is_idle() -> None:
    fast = replica("fast", cost=BUNDLED._replace(token_s=25e-6))
    assert set(counts(PredictedTtft(), [replica("slow"), fast], 50)) == {1}


def test_a_warm_replica_is_worth_a_short_queue() -> None:
    warm = replica("warm", Standing(pending_tokens=256, waiting=2, running=2), WARM)
    assert set(counts(PredictedTtft(), [replica("cold"), warm], 50)) == {1}


def test_an_idle_replica_is_used_when_the_queue_costs_more_than_a_copy() -> None:
    cold = replica("cold")
    queue = 0
    policy = PredictedTtft()
    while True:
        standing = Standing(pending_tokens=64 * queue, waiting=queue, running=4)
        warm = replica("warm", standing, WARM)
        if set(counts(policy, [cold, warm], 20)) == {0}:
            break
        queue += 1
        assert queue < 40
    # at most two computings more than it takes where it is cold
    assert predict(PROMPT, warm).ttft_s <= 3 * predict(PROMPT, cold).ttft_s
    roomy = replica("cold", Standing(reuse=0.0))
    few = Standing(pending_tokens=640, waiting=8, running=4)
    assert set(counts(policy, [roomy, replica("warm", few, WARM)], 20)) == {0}


def test_where_there_is_room_a_cold_prompt_pushes_nothing_out() -> None:
    candidates = [replica("full"), replica("roomy", Standing(reuse=0.0))]
    assert set(counts(PredictedTtft(), candidates, 50)) == {1}


def test_a_common_queue_does_not_drown_what_is_warm() -> None:
    long = Standing(pending_tokens=40000, waiting=40, running=16)
    candidates = [replica("cold", long), replica("warm", long, WARM)]
    assert set(counts(PredictedTtft(), candidates, 50)) == {1}


def test_the_urgent_goes_where_only_the_patient_wait() -> None:
    patient = Standing(pending_tokens=3000, waiting=3, queued=(Queued(2, 3, 3000),))
    others = Standing(pending_tokens=3000, waiting=3, queued=(Queued(0, 3, 3000),))
    candidates = [replica("a", others), replica("b", patient)]
    for priority, expected in ((0, {1}), (2, {0, 1})):
        request = RouteRequest(1088, 32, priority)
        random = Random(1)
        chosen = {PredictedTtft().choose(request, candidates, random) for _ in range(60)}
        assert chosen == expected


standings = st.builds(
    Standing,
    pending_tokens=st.integers(0, 6000),
    waiting=st.integers(0, 12),
    running=st.integers(0, 16),
    context_tokens=st.integers(0, 20000),
    full=st.booleans(),
    queued=st.sampled_from(
        [
            (),
            (Queued(1, 1, 10),),
            (Queued(0, 2, 500, b"a", 2.0), Queued(0, 9, 5000, b"b"), Queued(1, 1, 300, b"a")),
        ]
    ),
    yielding=st.sampled_from([(), ((1, 3),)]),
    answer_tokens=st.integers(0, 64),
    reuse=st.floats(0, 1),
)
cacheds = st.builds(Cached, *(st.integers(0, 30).map(lambda blocks: 16 * blocks) for _ in range(3)))
costs = st.sampled_from(
    [BUNDLED, BUNDLED._replace(token_s=230e-6), BUNDLED._replace(step_tokens=64)]
)


@given(
    candidates=st.lists(st.builds(Candidate, st.just("a"), costs, standings, cacheds), min_size=1),
    prompt=st.integers(1, 2500),
    flow=st.sampled_from([b"a", b"b", b"c"]),
)
@settings(max_examples=60, deadline=None)
def test_no_short_cut_changes_who_can_be_chosen(
    candidates: list[Candidate], prompt: int, flow: bytes
) -> None:
    request = RouteRequest(prompt, 32, flow=flow)
    usable = [index for index, one in enumerate(candidates) if not one.standing.full]
    usable = usable or list(range(len(candidates)))
    own = {}
    whole = {}
    for index in usable:
        queue_s, load_s, prefill_s = predict(request, candidates[index])
        standing = candidates[index].standing
        others = standing.waiting + standing.reuse + standing.reuse**2
        own[index] = load_s + prefill_s * (1 + others)
        whole[index] = queue_s + own[index]
    best = min(usable, key=lambda index: whole[index])
    bound_s = whole[best] + 0.1 * own[best]
    policy = PredictedTtft()
    random = Random(5)
    chosen = {policy.choose(request, candidates, random) for _ in range(30)}
    assert all(whole[index] <= bound_s * (1 + 1e-9) for index in chosen)
    if sum(whole[index] <= bound_s for index in usable) == 1:
        assert chosen == {best}


def test_a_promise_is_kept_where_it_can_be() -> None:
    # cheapest for all is where the prefix is, but that would be too late
    warm = replica("warm", Standing(pending_tokens=1500, waiting=2), WARM)
    candidates = [warm, replica("cold"), replica("full", Standing(full=True))]
    in_time_s = predict(PROMPT, candidates[1]).ttft_s * 1.01
    assert predict(PROMPT, warm).ttft_s > in_time_s
    random = Random(3)

    def chosen(due_s: float | None) -> set[int]:
        request = RouteRequest(1088, 32, due_s=due_s)
        return {PredictedTtft().choose(request, candidates, random) for _ in range(20)}

    assert chosen(None) == chosen(60.0) == {0}
    assert chosen(in_time_s) == {1}
    # nobody is in time, or it should have been there already: as if nothing had been promised
    assert chosen(0.01) == chosen(-1.0) == {0}


def test_affinity_goes_to_the_longest_prefix_whatever_its_queue() -> None:
    busy = Standing(pending_tokens=90000, waiting=90, running=16)
    some = replica("some", cached=Cached(dram=512))
    candidates = [replica("cold"), replica("warm", busy, Cached(device=512, redis=512)), some]
    assert set(counts(PrefixAffinity(), candidates, 20)) == {1}
    candidates.append(replica("equal", Standing(pending_tokens=64, waiting=1), WARM))
    assert set(counts(PrefixAffinity(), candidates, 20)) == {3}


def test_least_loaded_counts_sequences() -> None:
    policy = BUILT_IN["least-loaded"]()
    candidates = [
        replica("a", Standing(waiting=2, running=3), WARM),
        replica("b", Standing(pending_tokens=4000, waiting=1, running=3)),
        replica("c", Standing(running=5)),
    ]
    assert set(counts(policy, candidates, 20)) == {1}


def test_round_robin_takes_turns_while_replicas_come_and_go() -> None:
    policy, random = RoundRobin(), Random(2)
    names = ["a", "b", "c"]

    def turn(names: list[str]) -> str:
        return names[policy.choose(PROMPT, [replica(name) for name in names], random)]

    first = [turn(names) for _ in range(3)]
    assert sorted(first) == names
    assert [turn(names) for _ in range(6)] == first * 2
    left = [name for name in names if name != first[0]]
    assert [turn(left) for _ in range(4)] == first[1:] * 2
    assert turn([*left, "new"]) == "new"
    for generation in range(200):
        turn([f"{generation}-{index}" for index in range(3)])
    assert len(policy._last) <= 7


def test_round_robin_goes_by_what_was_sent_where_it_is_told() -> None:
    policy, random = RoundRobin(), Random(2)
    candidates = [replica("a"), replica("b"), replica("c")]
    policy.sent("a")
    first = {policy.choose(PROMPT, candidates, random) for _ in range(20)}
    assert first == {1, 2}
    for name in "bac":
        policy.sent(name)
    assert {policy.choose(PROMPT, candidates, random) for _ in range(20)} == {1}


def test_noise_is_not_negative() -> None:
    with pytest.raises(ValueError, match="noise"):
        PredictedTtft(noise=-0.1)
