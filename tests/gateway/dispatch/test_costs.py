"""Replicas are taken at their word as far as they have shown it lately, and to be alike for the
rest."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dispatch.costs import ReplicaCosts
from gateway.dispatch.member import Condition, Health
from gateway.dispatch.prefix import UNKNOWN
from gateway.dispatch.router import Router
from gateway.metrics import Metrics
from policies.cost import Coefficients
from policies.routing import RouteRequest
from tests.gateway.fakes import ScriptedReplica
from tests.gateway.stage import Observer, router_over

ASK = RouteRequest(prompt_tokens=300)


def cost(factor: float, step_tokens: int = 256) -> Coefficients:
    """A replica that takes so much longer than another."""
    seconds = [factor * each for each in (5e-3, 2e-4, 3e-4, 2e-9, 1e-8, 5e-5, 7e-5, 1e-3, 4e-4)]
    return Coefficients(*seconds, step_tokens=step_tokens, block_tokens=16)


def updated(own: dict[str, Coefficients], answers: dict[str, int], now_s: float) -> ReplicaCosts:
    """After so many answers at time 0."""
    costs = ReplicaCosts()
    for replica, count in answers.items():
        for _ in range(count):
            costs.answered(replica, 0.0)
    costs.update(own, now_s)
    return costs


def test_those_that_have_shown_nothing_are_alike() -> None:
    own = {"a": cost(1.0), "b": cost(1.4, step_tokens=512), "c": cost(0.6)}
    costs = updated(own, {}, 0.0).costs
    assert costs["a"] == costs["c"]
    assert costs["b"] == costs["a"]._replace(step_tokens=512)
    assert costs["a"].token_s == pytest.approx(cost(1.0).token_s)


def test_one_that_has_shown_nothing_is_taken_for_one_that_has() -> None:
    costs = updated({"new": cost(10.0), "old": cost(1.0)}, {"old": 3}, 0.0).costs
    assert costs["new"].token_s == pytest.approx(costs["old"].token_s, rel=0.01)
    assert costs["new"].token_s == pytest.approx(cost(1.0).token_s, rel=0.01)


def test_what_is_shown_again_and_again_is_believed_and_then_forgotten() -> None:
    own = {"slow": cost(3.0), "fast": cost(1.0)}
    counts = {"slow": 500, "fast": 500}
    at_once, later, at_last = (updated(own, counts, now_s).costs for now_s in (0.0, 300.0, 1200.0))

    def ratio(costs) -> float:
        return costs["slow"].constant_s / costs["fast"].constant_s

    assert ratio(at_once) > 2.5
    assert ratio(at_once) > ratio(later) > ratio(at_last)
    assert ratio(at_last) == pytest.approx(1.0, abs=0.01)


def test_a_life_that_is_over_tells_nothing_of_the_next() -> None:
    costs = updated({"a": cost(3.0), "b": cost(1.0)}, {"a": 100, "b": 100}, 0.0)
    costs.forget("a")
    assert costs.due(0.01)
    costs.update({"a": cost(0.5), "b": cost(1.0)}, 0.01)
    assert costs.costs["a"].token_s == pytest.approx(cost(1.0).token_s, rel=0.01)


def test_it_is_due_now_and_then() -> None:
    own = {"a": cost(1.0), "b": cost(2.0)}
    costs = ReplicaCosts()
    assert costs.due(0.0)
    costs.update(own, 0.0)
    assert not costs.due(0.1)
    assert costs.due(1.0)
    costs.outdated()
    assert costs.due(0.1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 200)), min_size=2, max_size=6))
def test_nobody_is_outside_of_what_the_replicas_say(said: list[tuple[float, int]]) -> None:
    own = {f"m/{number}": cost(factor) for number, (factor, _) in enumerate(said)}
    counts = {f"m/{number}": count for number, (_, count) in enumerate(said)}
    costs = updated(own, counts, 1.0).costs
    assert list(costs) == list(own)
    least, most = (pick(each.token_s for each in own.values()) for pick in (min, max))
    for replica, blended in costs.items():
        assert least * 0.999 <= blended.token_s <= most * 1.001
        assert blended.step_tokens == own[replica].step_tokens


class Told(ScriptedReplica):
    """Says what it is told to say."""

    said = cost(1.0)
    condition = Condition.SERVING

    def coefficients(self) -> Coefficients:
        return self.said

    def health(self) -> Health:
        return Health(self.condition)


def fleet(*factors: float) -> tuple[Router[ScriptedReplica], list[Told]]:
    replicas = [Told(name=f"m/{number}") for number in range(len(factors))]
    for replica, factor in zip(replicas, factors, strict=True):
        replica.said = cost(factor)
    return router_over("m", replicas, Observer(Metrics(["m"], [], b"secret"))), replicas


def test_cold_prompts_are_spread_whatever_was_measured_at_the_start() -> None:
    routed, _ = fleet(1.0, 1.3, 0.7, 2.0)
    chosen = Counter[str]()
    for _ in range(120):
        with routed.place(ASK, UNKNOWN) as placement:
            chosen[placement.member.name] += 1
    assert min(chosen[f"m/{number}"] for number in range(4)) >= 10, chosen


def test_a_replica_that_comes_back_draws_nobody_by_what_it_says() -> None:
    routed, replicas = fleet(1.0, 1.0)
    for _ in range(40):
        with routed.place(ASK, UNKNOWN) as placement:
            placement.began(0)
    replicas[0].condition = Condition.DOWN
    routed.changed()
    assert routed.decide(ASK, UNKNOWN).candidate.name == "m/1"
    replicas[0].condition = Condition.SERVING
    replicas[0].said = cost(0.3)
    routed.changed()
    chosen = Counter(routed.decide(ASK, UNKNOWN).candidate.name for _ in range(100))
    assert 25 <= chosen["m/0"] <= 75
