from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cost import Coefficients
from policies.routing import NOTHING_CACHED, Cached, Candidate, RouteRequest, Standing
from policies.routing_policies import BUILT_IN, PredictedTtft
from policies.routing_prediction import predict
from policies.routing_shortlist import SHORTLISTS, Holders, TtftShortlist

COST = Coefficients(5e-3, 2e-4, 3e-4, 2e-9, 1e-8, 5e-5, 7e-5, 1e-3, 4e-4, 256, 16)
MOST = 4
NOISE = 0.1

standings = st.builds(
    Standing,
    pending_tokens=st.integers(0, 4000),
    waiting=st.integers(0, 5),
    running=st.integers(0, 20),
    context_tokens=st.integers(0, 20_000),
    full=st.booleans(),
    answer_tokens=st.integers(1, 300),
    reuse=st.sampled_from([0.0, 1.0]),
)
prefixes = st.builds(
    lambda device, dram, redis: Cached(16 * device, 16 * dram, 16 * redis),
    st.integers(0, 40),
    st.integers(0, 20),
    st.integers(0, 20),
)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Standing], list[Cached]]:
    fleet = draw(st.lists(standings, min_size=6, max_size=24))
    kinds = draw(st.lists(prefixes, min_size=1, max_size=3))
    cached = [draw(st.sampled_from([NOTHING_CACHED, *kinds])) for _ in fleet]
    return fleet, cached


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


@settings(max_examples=50, deadline=None)
@given(fleets(), st.integers(1, 3000))
def test_predicted_ttft_loses_nothing_beyond_its_noise(
    drawn: tuple[list[Standing], list[Cached]], prompt_tokens: int
) -> None:
    fleet, cached = drawn
    request = RouteRequest(prompt_tokens)
    candidates = candidates_of(fleet, cached)
    chosen = choose_from_list("predicted-ttft", request, candidates, cached)
    usable = [each for each in candidates if not each.standing.full] or candidates
    least_s, own_s = min(cost_s(request, each) for each in usable)
    if usable is not candidates:
        assert not candidates[chosen].standing.full
        assert cost_s(request, candidates[chosen])[0] <= (least_s + NOISE * own_s) * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(fleets(), st.integers(1, 3000), st.floats(0.01, 3.0))
def test_who_can_be_in_time_is_listed(
    drawn: tuple[list[Standing], list[Cached]], prompt_tokens: int, due_s: float
) -> None:
    fleet, cached = drawn
    request = RouteRequest(prompt_tokens, due_s=due_s)
    candidates = candidates_of(fleet, cached)

    def in_time(number: int) -> bool:
        candidate = candidates[number]
        ttft_s = predict(request, candidate).ttft_s
        return not candidate.standing.full and ttft_s <= due_s * (1 - 1e-9)

    chosen = choose_from_list("predicted-ttft", request, candidates, cached)
    everybody = PredictedTtft().choose(request, candidates, Random(2))
    if in_time(everybody):
        assert in_time(chosen)


@settings(max_examples=50, deadline=None)
@given(fleets(), st.integers(1, 3000))
def test_the_other_policies_choose_as_well_as_from_all(
    drawn: tuple[list[Standing], list[Cached]], prompt_tokens: int
) -> None:
    fleet, cached = drawn
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
