from __future__ import annotations

from random import Random

import numpy as np

from policies.cost import Coefficients
from policies.routing import NOTHING_CACHED, Cached, Candidate, RouteRequest, Standing
from policies.routing_policies import BUILT_IN
from policies.routing_prediction import predict
from policies.routing_shortlist import SHORTLISTS, Holders, TtftShortlist
from policies.routing_ttft import PredictedTtft

COST = Coefficients(5e-3, 2e-4, 3e-4, 2e-9, 1e-8, 5e-5, 7e-5, 1e-3, 4e-4, 256, 16)
MOST = 4
NOISE = 0.1


def draw_fleet(random: Random) -> tuple[list[Standing], list[Cached]]:
    """Standings of one flow, and what each replica has of a prompt."""
    kinds = [
        Cached(*(16 * random.randint(0, most) for most in (40, 20, 20)))
        for _ in range(random.randint(1, 3))
    ]
    idle = random.random()
    fleet, cached = [], []
    for _ in range(random.randint(6, 24)):
        busy = Standing(
            pending_tokens=random.randint(0, 4000),
            waiting=random.randint(0, 5),
            running=random.randint(0, 20),
            context_tokens=random.randint(0, 20_000),
            full=random.random() < 0.2,
            answer_tokens=random.randint(1, 300),
            reuse=random.choice((0.0, 1.0)),
        )
        fleet.append(Standing() if random.random() < idle else busy)
        cached.append(random.choice((NOTHING_CACHED, *kinds)))
    return fleet, cached


DRAWS = [(seed, Random(seed).randint(1, 3000)) for seed in range(120)]


def holders(cached: list[Cached]) -> list[Holders]:
    kinds = sorted({each for each in cached if each != NOTHING_CACHED})
    return [
        Holders(np.array([at for at, each in enumerate(cached) if each == kind], np.intp), kind)
        for kind in kinds
    ]


def cost_s(request: RouteRequest, candidate: Candidate) -> tuple[float, float]:
    """What a choice costs as `PredictedTtft` explains it, and the request's own part."""
    queue_s, load_s, prefill_s = predict(request, candidate)
    standing = candidate.standing
    turns = 1 + standing.waiting + standing.reuse + standing.reuse**2
    own_s = load_s + prefill_s * turns
    return queue_s + own_s, own_s


def choose_from_list(
    policy: str, request: RouteRequest, candidates: list[Candidate], cached: list[Cached]
) -> int:
    shortlist = SHORTLISTS[policy](COST, len(candidates), MOST)
    for number, candidate in enumerate(candidates):
        shortlist.note(number, candidate.standing)
    listed = shortlist.likely(request, holders(cached), Random(1))
    assert sorted(set(listed)) == list(listed)
    assert len(listed) <= 2 * MOST
    chosen = BUILT_IN[policy]().choose(request, [candidates[each] for each in listed], Random(2))
    return listed[chosen]


def candidates_of(fleet: list[Standing], cached: list[Cached]) -> list[Candidate]:
    return [
        Candidate(f"r{number}", COST, standing, prefix)
        for number, (standing, prefix) in enumerate(zip(fleet, cached, strict=True))
    ]


def test_predicted_ttft_loses_nothing_beyond_its_noise() -> None:
    for seed, prompt_tokens in DRAWS:
        fleet, cached = draw_fleet(Random(seed))
        request = RouteRequest(prompt_tokens)
        candidates = candidates_of(fleet, cached)
        chosen = candidates[choose_from_list("predicted-ttft", request, candidates, cached)]
        usable = [each for each in candidates if not each.standing.full]
        if usable:
            least_s, own_s = min(cost_s(request, each) for each in usable)
            assert not chosen.standing.full
            assert cost_s(request, chosen)[0] <= (least_s + NOISE * own_s) * (1 + 1e-9)


def test_who_can_be_in_time_is_listed() -> None:
    rescued = 0
    for seed, prompt_tokens in DRAWS:
        fleet, cached = draw_fleet(Random(seed))
        candidates = candidates_of(fleet, cached)
        request = RouteRequest(prompt_tokens)
        soonest_s = min(
            (predict(request, each).ttft_s for each in candidates if not each.standing.full),
            default=0.0,
        )
        due_s = soonest_s * 1.05
        promised = RouteRequest(prompt_tokens, due_s=due_s)
        chosen = candidates[choose_from_list("predicted-ttft", promised, candidates, cached)]
        everybody = PredictedTtft().choose(promised, candidates, Random(2))
        if predict(request, candidates[everybody]).ttft_s <= due_s:
            rescued += 1
            assert predict(request, chosen).ttft_s <= due_s * (1 + 1e-9)
    assert rescued > len(DRAWS) // 2


def test_the_other_policies_choose_as_well_as_from_all() -> None:
    for seed, prompt_tokens in DRAWS[:60]:
        fleet, cached = draw_fleet(Random(seed))
        fleet = [each._replace(full=False) for each in fleet]
        request = RouteRequest(prompt_tokens)
        candidates = candidates_of(fleet, cached)

        chosen = candidates[choose_from_list("prefix-affinity", request, candidates, cached)]
        best = candidates[BUILT_IN["prefix-affinity"]().choose(request, candidates, Random(2))]
        assert chosen.cached.tokens == best.cached.tokens
        assert predict(request, chosen).queue_s == predict(request, best).queue_s

        chosen = candidates[choose_from_list("least-loaded", request, candidates, cached)]
        assert chosen.standing.waiting + chosen.standing.running == min(
            each.waiting + each.running for each in fleet
        )


def test_round_robin_comes_to_everybody_once_in_a_round() -> None:
    shortlist = SHORTLISTS["round-robin"](COST, 7, MOST)
    shortlist.note(3, Standing(full=True))
    random = Random(5)
    turns = [shortlist.likely(RouteRequest(10), (), random)[0] for _ in range(12)]
    assert sorted(turns[:6]) == sorted(turns[6:]) == [0, 1, 2, 4, 5, 6]


def test_chance_comes_to_everybody_who_is_not_full() -> None:
    shortlist = SHORTLISTS["random"](COST, 7, MOST)
    shortlist.note(3, Standing(full=True))
    random = Random(5)
    seen = {each for _ in range(60) for each in shortlist.likely(RouteRequest(10), (), random)}
    assert seen == {0, 1, 2, 4, 5, 6}


def test_equals_are_listed_by_chance() -> None:
    shortlist = TtftShortlist(COST, 40, MOST)
    random = Random(5)
    seen = {each for _ in range(100) for each in shortlist.likely(RouteRequest(900), (), random)}
    assert len(seen) > 30


def test_a_standing_that_has_changed_counts_at_once() -> None:
    shortlist = TtftShortlist(COST, 40, MOST)
    busy = Standing(5000, 8, 4, 4000)
    for number in range(40):
        if number != 17:
            shortlist.note(number, busy)
    assert 17 in shortlist.likely(RouteRequest(900), (), Random(1))
    shortlist.note(17, busy._replace(pending_tokens=50_000, waiting=16))
    assert 17 not in shortlist.likely(RouteRequest(900), (), Random(1))
