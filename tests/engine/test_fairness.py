"""Flows of one class share the engine by their weights; within a flow what is due goes first."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.engine.flow_stage import FlowStage

WEIGHTS = {b"one": 1.0, b"two": 2.0, b"four": 4.0}
Lengths = Callable[[random.Random], tuple[int, int]]


class Offered:
    """Keeps so many requests of every flow waiting, all the time."""

    def __init__(self, stage: FlowStage, backlog: int = 6) -> None:
        self.stage = stage
        self.lengths: dict[bytes, Lengths] = {}
        self._backlog = backlog
        self._random = random.Random(7)
        self._count = 0

    def step(self) -> None:
        waiting = [each.request.flow for each in self.stage.scheduler.waiting]
        for flow, lengths in self.lengths.items():
            for _ in range(self._backlog - waiting.count(flow)):
                prompt, answer = lengths(self._random)
                name = f"{flow!r} {self._count}"
                self.stage.submit(name, prompt, answer, flow=flow, weight=WEIGHTS[flow])
                self._count += 1
        self.stage.step()

    def shares(self, steps: int) -> dict[bytes, float]:
        """Of all that these flows were served in so many steps, each one's over its weight's."""
        before = self.stage.units.copy()
        for _ in range(steps):
            self.step()
        served = self.stage.units - before
        weight = sum(WEIGHTS[flow] for flow in self.lengths)
        total = served.total()
        return {flow: served[flow] / total * weight / WEIGHTS[flow] for flow in self.lengths}


def alike(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(20, 60), rng.randrange(5, 30)


def long_prompts(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(200, 400), rng.randrange(1, 5)


def long_answers(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(5, 20), rng.randrange(60, 120)


@pytest.mark.parametrize(
    "lengths",
    [
        (alike, alike, alike),
        (long_prompts, long_answers, alike),
        (alike, long_prompts, long_answers),
        (long_answers, alike, long_prompts),
    ],
    ids=lambda lengths: "-".join(each.__name__ for each in lengths),
)
def test_backlogged_flows_are_served_by_their_weights(lengths):
    offered = Offered(FlowStage(max_running=8, step_tokens=64))
    offered.lengths = dict(zip(WEIGHTS, lengths, strict=True))
    for _ in range(200):
        offered.step()
    shares = offered.shares(1500)
    assert all(share == pytest.approx(1.0, abs=0.05) for share in shares.values()), shares
    assert len(offered.stage.done) > 200


def test_tokens_of_flows_with_like_requests_are_by_weight_too():
    stage = FlowStage(max_running=8, step_tokens=64)
    offered = Offered(stage)
    offered.lengths = dict.fromkeys(WEIGHTS, alike)
    for _ in range(1200):
        offered.step()
    total = stage.tokens.total()
    for flow, weight in WEIGHTS.items():
        assert stage.tokens[flow] / total == pytest.approx(weight / 7, rel=0.05)


def test_a_flow_that_comes_late_gets_its_share_from_then_on_and_no_more():
    offered = Offered(FlowStage(max_running=8, step_tokens=64))
    offered.lengths = {b"one": alike, b"four": alike}
    for _ in range(600):
        offered.step()
    offered.lengths[b"two"] = alike
    shares = offered.shares(800)
    assert all(share == pytest.approx(1.0, abs=0.05) for share in shares.values()), shares


def test_idle_time_earns_nothing():
    offered = Offered(FlowStage(max_running=8, step_tokens=64))
    offered.lengths = {b"one": alike, b"four": alike}
    for _ in range(300):
        offered.step()
    gone = offered.lengths.pop(b"four")
    for _ in range(300):
        offered.step()
    offered.lengths[b"four"] = gone
    shares = offered.shares(600)
    assert all(share == pytest.approx(1.0, abs=0.06) for share in shares.values()), shares


def test_using_what_nobody_else_wants_is_not_held_against_a_flow():
    stage = FlowStage(max_running=4, step_tokens=64)
    for index in range(40):
        stage.submit(f"alone {index}", 50, 10, flow=b"one")
        stage.run(3)
    for index in range(8):
        stage.submit(f"a{index}", 50, 10, flow=b"one")
        stage.submit(f"b{index}", 50, 10, flow=b"two")
    before = len(stage.started)
    stage.finish()
    first = [name[0] for name in stage.started[before:] if name[0] in "ab"][:8]
    assert 3 <= first.count("a") <= 5


def test_free_slots_are_not_all_taken_by_one_flow_whose_prompts_are_cached():
    stage = FlowStage(max_running=8)
    prompt = list(range(65))
    stage.submit("first", prompt, 1)
    stage.finish()
    for index in range(8):
        stage.submit(f"a{index}", prompt, 50, flow=b"a")
    for index in range(8):
        stage.submit(f"b{index}", prompt, 50, flow=b"b")
    stage.step()
    flows = [each.request.flow for each in stage.scheduler.running]
    assert flows.count(b"a") == flows.count(b"b") == 4


def test_a_short_prompt_does_not_wait_for_anothers_long_one_under_way():
    stage = FlowStage(step_tokens=64)
    stage.submit("long", 1000, flow=b"a")
    stage.submit("long too", 1000, flow=b"a")
    stage.step()
    stage.submit("short", 40, flow=b"b")
    assert stage.step() == {"short": 40, "long": 24}
    stage.submit("short of its own", 40, flow=b"a")
    assert stage.step() == {"short": 1, "long": 63}


def test_prompts_of_equal_length_are_computed_one_after_the_other():
    stage = FlowStage(step_tokens=64)
    for flow in b"abc":
        stage.submit(chr(flow), 128, 1, flow=bytes([flow]))
    assert [stage.step() for _ in range(6)] == [{name: 64} for name in "aabbcc"]


def test_a_flow_with_more_weight_is_not_kept_out_by_one_with_many_requests():
    stage = FlowStage(max_running=1)
    for index in range(20):
        stage.submit(f"a{index}", 30, 4, flow=b"a", weight=1)
    for index in range(20):
        stage.submit(f"b{index}", 30, 4, flow=b"b", weight=3)
    stage.finish()
    assert sum(name[0] == "b" for name in stage.started[:16]) == pytest.approx(12, abs=1)


def test_within_a_flow_the_earliest_deadline_goes_first():
    stage = FlowStage(max_running=1)
    stage.submit("runs", 20)
    stage.step()
    stage.submit("none", 20)
    stage.submit("later", 20, deadline_s=5.0)
    stage.submit("sooner", 20, deadline_s=2.0)
    stage.submit("beyond patience", 20, deadline_s=3600.0)
    stage.finish()
    assert stage.done == ["runs", "sooner", "later", "none", "beyond patience"]


def test_who_is_late_lets_those_before_who_are_not():
    stage = FlowStage(max_running=1, step_s=0.1)
    stage.submit("runs", 20, 10)
    stage.step()
    stage.submit("late", 20, deadline_s=0.5)
    stage.submit("in time", 20, deadline_s=20.0)
    stage.finish()
    assert stage.done == ["runs", "in time", "late"]


def test_nobody_waits_for_ever_behind_those_with_deadlines():
    stage = FlowStage(max_running=1, step_s=0.5)
    stage.submit("none", 20, 2)
    stage.submit("late", 20, 2, deadline_s=0.1)
    for index in range(60):
        stage.submit(f"due {index}", 20, 2, deadline_s=stage.now_s + 1.4)
        stage.run(2)
    assert {"none", "late"} <= set(stage.done)
    stage.finish()


def test_who_has_begun_goes_on_before_others_of_its_class_begin():
    stage = FlowStage(pages=12, max_running=3, step_tokens=160)
    stage.submit("first", 60, 60, flow=b"a")
    stage.submit("second", 60, 60, flow=b"a")
    stage.step()
    for index in range(3):
        stage.submit(f"new {index}", 60, 4, flow=b"b", deadline_s=stage.now_s)
    while not stage.scheduler.preemptions:
        stage.step()
    assert next(iter(stage.scheduler.waiting)).request.request_id == "second"
    while "new 0" not in stage.started:
        stage.step()
    assert stage.sequences["second"].slot is not None
    stage.finish()


def test_a_long_prompt_is_not_overtaken_while_it_waits_for_pages():
    stage = FlowStage(pages=32, max_running=8, step_tokens=256)
    for index in range(6):
        stage.submit(f"a{index}", 40, 20 + 10 * index, flow=b"a")
    stage.run(3)
    stage.submit("long", 400, 2, flow=b"b")
    for index in range(20):
        stage.submit(f"b{index}", 20, 4, flow=b"b")
        stage.submit(f"c{index}", 20, 4, flow=b"c", weight=0.5)
    stage.finish()
    assert "c5" in stage.started
    assert stage.started.index("long") < stage.started.index("c5")
    assert stage.started.index("long") < stage.started.index("b0")


def test_a_leader_of_another_flow_is_waited_for_and_urged():
    stage = FlowStage(step_tokens=64)
    prompt = list(range(150))
    stage.submit("leads", prompt, flow=b"a", priority=2)
    stage.step()
    stage.submit("between", 300, flow=b"c", priority=1)
    stage.submit("follows", [*prompt[:144], 7, 7], flow=b"b", priority=0)
    stage.step()
    assert stage.sequences["leads"].rank.priority == 0
    assert stage.step()["leads"] == 64
    stage.finish()
    assert stage.done.index("follows") < stage.done.index("between")
