"""A router with policies of all kinds: whatever they do, requests find a replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.dispatch.load import Load
from gateway.dispatch.prefix import UNKNOWN
from gateway.dispatch.router import NoReplica, Router
from gateway.metrics import Metrics
from policies.routing import NOTHING_CACHED, Queued, RouteRequest
from policies.routing_policies import RoundRobin
from tests.gateway.fakes import ScriptedReplica
from tests.gateway.stage import Observer, router_over

ASK = RouteRequest(prompt_tokens=100)


def router(count: int = 2) -> Router[ScriptedReplica]:
    replicas = [ScriptedReplica(name=f"m/{number}") for number in range(count)]
    return router_over("m", replicas, Observer(Metrics(["m"], [], b"secret")))


class Answers:
    """A policy that chooses what it was given, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked = 0

    def choose(self, request, candidates, random) -> Any:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [2, -1, 1.0, "m/0", None, RuntimeError("no idea"), KeyError("m/0")],
    ids=["beyond", "negative", "float", "name", "nothing", "raises", "raises a lookup error"],
)
def test_a_policy_that_fails_is_stood_in_for(answer: Any) -> None:
    routed = router()
    broken = Answers(answer)
    routed.use_policy("broken", broken)
    with capture_logs() as logs:
        receipts = [routed.decide(ASK, UNKNOWN) for _ in range(40)]
    assert broken.asked == 40
    assert {receipt.policy for receipt in receipts} == {"predicted-ttft"}
    assert {receipt.candidate.name for receipt in receipts} == {"m/0", "m/1"}
    [line] = [line for line in logs if line["event"] == "routing policy failed"]
    assert (line["policy"], line["model"]) == ("broken", "m")
    assert line["exc_info"] is not None


def test_every_policy_that_fails_is_named_once() -> None:
    routed = router()
    with capture_logs() as logs:
        for name in ("one", "two"):
            routed.use_policy(name, Answers(9))
            routed.decide(ASK, UNKNOWN)
            routed.decide(ASK, UNKNOWN)
    assert [line["policy"] for line in logs] == ["one", "two"]


def test_a_policy_that_works_is_followed() -> None:
    routed = router()
    routed.use_policy("last", Answers(1))
    receipt = routed.decide(ASK, UNKNOWN)
    assert (receipt.candidate.name, receipt.policy) == ("m/1", "last")


@pytest.mark.parametrize("count", [2, 3, 4])
def test_turns_are_taken_by_what_is_sent_however_often_it_is_asked(count: int) -> None:
    """A request is looked at when it is let in, perhaps while it waits, and when it is sent; who
    asks for a dry run looks, too."""
    routed = router(count)
    routed.use_policy("round-robin", RoundRobin())
    sent: Counter[str] = Counter()
    for number in range(5 * count):
        for _ in range(number % 4):
            routed.decide(ASK, UNKNOWN)
        with routed.place(ASK, UNKNOWN) as placement:
            sent[placement.member.name] += 1
    assert set(sent.values()) == {5}


def test_a_policy_that_fails_when_it_is_told_is_followed_still() -> None:
    class Deaf(Answers):
        def sent(self, replica: str) -> None:
            raise RuntimeError(replica)

    routed = router()
    routed.use_policy("deaf", Deaf(1))
    with capture_logs() as logs:
        for _ in range(2):
            with routed.place(ASK, UNKNOWN) as placement:
                assert (placement.member.name, placement.receipt.policy) == ("m/1", "deaf")
    assert [line["event"] for line in logs] == ["routing policy failed"]
    assert not any(member.load.sequences for member in routed.members)


def test_a_policy_can_take_no_candidate_away() -> None:
    class Greedy:
        def choose(self, request, candidates, random) -> int:
            candidates.clear()
            return 0

    routed = router()
    routed.use_policy("greedy", Greedy())
    with capture_logs():
        receipt = routed.decide(ASK, UNKNOWN)
    assert receipt.policy == "predicted-ttft"
    assert len(receipt.candidates) == 2


def test_what_was_foreseen_stands_until_something_happens() -> None:
    routed = router()
    first = routed.decide(ASK, UNKNOWN)
    with routed.place(ASK, UNKNOWN, foreseen=first) as placed:
        assert placed.receipt is first
        assert routed.place(ASK, UNKNOWN, foreseen=first).receipt is not first  # it is taken
    changes: list[Callable[[], object]] = [
        routed.changed,
        lambda: routed.use_policy("another", Answers(1)),
        lambda: routed.decide(ASK, UNKNOWN),
        lambda: routed.members[0].load.note_pages(5, 5),
        lambda: setattr(routed.members[foreseen.chosen], "draining", True),
        lambda: routed.remove(foreseen.candidate.name),
    ]
    for change in changes:
        foreseen = routed.decide(ASK, UNKNOWN)
        change()
        placed = routed.place(ASK, UNKNOWN, foreseen=foreseen)
        assert placed.receipt is not foreseen
        assert placed.member in routed.members
        assert placed.member.takes_requests()
        for member in routed.members:
            member.draining = False


def test_what_was_foreseen_does_not_stand_for_ever() -> None:
    routed = router()
    foreseen = routed.decide(ASK, UNKNOWN)
    foreseen.decided_s -= 1.0
    assert routed.place(ASK, UNKNOWN, foreseen=foreseen).receipt is not foreseen


def test_candidates_are_made_of_what_is_there_already() -> None:
    routed = router(3)
    candidates = routed.decide(ASK, UNKNOWN).candidates
    again = routed.decide(ASK, UNKNOWN).candidates
    for one, other in zip(candidates, again, strict=True):
        assert one.cached is other.cached is NOTHING_CACHED
        assert one.cost is other.cost
        assert one.standing is other.standing


def test_a_placed_request_waits_at_its_priority() -> None:
    routed = router(1)
    ask = RouteRequest(100, priority=2, flow=b"acme", weight=3.0)
    with routed.place(ask, UNKNOWN) as placement:
        [queued] = placement.member.load.standing().queued
        assert queued._replace(tokens_per_s=0.0) == Queued(2, 1, 100, b"acme", 3.0)
        placement.answered(30)
    standing = placement.member.load.standing()
    assert (standing.queued, standing.answer_tokens) == ((), 30)


def test_replicas_of_a_model_learn_together_how_long_answers_are() -> None:
    routed = router(2)
    with routed.place(ASK, UNKNOWN) as placement:
        placement.answered(12)
    assert [member.load.standing().answer_tokens for member in routed.members] == [12, 12]


def test_the_last_places_are_for_the_more_urgent() -> None:
    routed = router(1)
    [member] = routed.members
    member.load = Load(2, capacity=10)  # 8 places in line: 7 for standard, 4 for batch
    with ExitStack() as taken:
        for priority, places in ((2, 6), (1, 9), (0, 10)):
            ask = RouteRequest(10, priority=priority)
            while member.load.sequences < places:
                assert routed.decide(ask, UNKNOWN).candidate.name == "m/0"
                taken.enter_context(member.load.share(10, 10, priority))
            with pytest.raises(NoReplica) as refused:
                routed.decide(ask, UNKNOWN)
            assert refused.value.full


def test_late_first_tokens_are_remembered_by_replica_class_and_flow() -> None:
    routed = router(2)
    ask = RouteRequest(100, priority=1, flow=b"acme")
    for _ in range(30):
        receipt = routed.decide(ask, UNKNOWN)
        routed.note_answer(receipt, receipt.decided_s + 3 * receipt.predicted_ttft_s)
        name = receipt.candidate.name
    now_s = receipt.decided_s
    late = routed.bias(name, ask, now_s)
    assert 1.5 < late <= 3.0
    assert routed.bias(name, RouteRequest(100, flow=b"acme"), now_s) == 1.0
    other = RouteRequest(100, priority=1, flow=b"beta")
    assert routed.bias(name, other, now_s) == pytest.approx(late)
    for _ in range(40):
        prompt = routed.decide(other, UNKNOWN, exclude={"m/0", "m/1"} - {name})
        routed.note_answer(prompt, prompt.decided_s + prompt.predicted_ttft_s)
    assert routed.bias(name, other, now_s) < 1.2
    assert routed.bias(name, ask, now_s) == pytest.approx(late, rel=0.05)
    routed.remove(name)
    assert routed.bias(name, ask, now_s) == 1.0
    # what was sent there before may still come
    routed.note_answer(receipt, receipt.decided_s + 1.0)
    assert routed.bias(name, ask, now_s) == 1.0


def test_whoever_watches_hears_of_every_change_and_of_none_after_that() -> None:
    routed, heard = router(1), []
    with routed.watched(lambda: heard.append(1)):
        with routed.place(ASK, UNKNOWN) as placement:
            assert heard
            heard.clear()
            placement.began(0)
            assert heard
            heard.clear()
        assert heard
        heard.clear()
        routed.changed()
        assert heard
    heard.clear()
    with routed.place(ASK, UNKNOWN):
        routed.changed()
    assert not heard


def test_nobody_is_asked_where_nobody_serves() -> None:
    routed = router()
    policy = Answers(RuntimeError("not to be asked"))
    routed.use_policy("broken", policy)
    for member in routed.members:
        member.draining = True
    with pytest.raises(NoReplica) as refused:
        routed.decide(ASK, UNKNOWN)
    assert (refused.value.full, policy.asked) == (False, 0)
