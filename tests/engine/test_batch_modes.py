"""Static and dynamic batching: nobody joins a batch that runs, and every batch is made in time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine, EngineOptions
from policies.batching import CONTINUOUS, Batching, BatchingMode
from tests.engine.flow_stage import FlowStage
from tests.engine.harness import Collector, request, run_all
from tests.engine.mock_executor import MockExecutor, expected_text

DYNAMIC = Batching(BatchingMode.DYNAMIC, size=3, window_s=0.1)
STATIC = Batching(BatchingMode.STATIC, size=3)


def running(stage: FlowStage) -> set[str]:
    return {each.request.request_id for each in stage.scheduler.running}


@pytest.mark.parametrize("batching", [DYNAMIC, STATIC])
def test_a_short_answer_keeps_its_place_until_the_longest_is_through(batching):
    stage = FlowStage(batching=batching)
    for name, answer in (("short", 1), ("long", 12), ("other", 2)):
        stage.submit(name, 20, answer)
    stage.step()
    for name in ("next", "after", "third"):
        stage.submit(name, 20, 2)
    while "long" in stage.sequences:
        stage.check()
        assert {"next", "after", "third"}.isdisjoint(stage.step())
    assert stage.done == ["short", "other", "long"]
    assert set(stage.step()) == {"next", "after", "third"}
    stage.finish()


def test_beside_continuous_batching_short_ones_go_on_while_a_long_one_runs():
    stage = FlowStage(max_running=2)
    stage.submit("long", 20, 50)
    for number in range(5):
        stage.submit(f"short {number}", 20, 2)
    stage.finish()
    assert stage.done[-1] == "long"


def test_a_batch_that_is_not_full_begins_when_the_window_is_over():
    stage = FlowStage(batching=DYNAMIC, step_s=0.04)
    stage.submit("a", 20)
    stage.submit("b", 20)
    due_s = stage.scheduler.next_batch_s
    assert due_s == 0.1
    while stage.now_s < due_s:
        assert stage.step() == {}
        stage.check()
    assert set(stage.step()) == {"a", "b"}
    assert stage.scheduler.next_batch_s is None
    stage.finish()


def test_a_static_batch_waits_to_be_full_and_the_rest_are_not_left_for_ever():
    stage = FlowStage(batching=STATIC, step_s=1.0)
    for number in range(4):
        stage.submit(f"{number}", 20, 3)
    assert set(stage.step()) == {"0", "1", "2"}
    while len(stage.sequences) > 1:
        stage.step()
    assert stage.now_s < 10.0
    while stage.now_s < 10.0:
        assert stage.step() == {}
    assert set(stage.step()) == {"3"}
    stage.finish()


def test_the_more_urgent_is_first_in_the_next_batch_and_takes_nothing_from_this_one():
    stage = FlowStage(max_running=3, batching=STATIC)
    for number in range(6):
        stage.submit(f"{number}", 20, 4)
    stage.step()
    stage.submit("urgent", 20, 4, priority=-1)
    while len(stage.done) < 3:
        assert "urgent" not in stage.step()
    assert set(stage.step()) == {"urgent", "3", "4"}
    assert stage.scheduler.preemptions == 0


def test_a_batch_whose_prompts_take_several_steps_is_let_in_whole():
    stage = FlowStage(step_tokens=16, batching=STATIC)
    for name in ("one", "two", "three"):
        stage.submit(name, 40, 2)
    stage.step()
    stage.submit("late", 1, 1)
    while len(stage.started) < 3:
        stage.step()
    assert stage.started == ["one", "two", "three"]
    assert "late" in stage.sequences


def test_who_is_preempted_comes_back_into_its_own_batch():
    stage = FlowStage(pages=8, batching=STATIC)
    for name in ("one", "two", "three"):
        stage.submit(name, 30, 60)
    for number in range(3):
        stage.submit(f"next {number}", 20, 1)
    for _ in range(500):
        if len(stage.done) == 3:
            break
        stage.step()
        stage.check()
    assert stage.scheduler.preemptions > 0
    assert set(stage.done) == {"one", "two", "three"}
    assert set(stage.started) == set(stage.done)


def test_those_who_leave_make_room_for_the_next_batch():
    stage = FlowStage(batching=STATIC)
    for number in range(7):
        stage.submit(f"{number}", 20, 50)
    stage.step()
    stage.abort("4")  # of those who wait
    for name in ("0", "1", "2"):
        stage.abort(name)
    stage.check()
    assert set(stage.step()) == {"3", "5", "6"}


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([DYNAMIC, STATIC]),
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 60), st.integers(1, 9), st.integers(0, 2)),
        min_size=1,
        max_size=14,
    ),
)
def test_nobody_joins_a_batch_and_everybody_is_answered(batching, work):
    """Few pages, so that members are preempted. `work`: steps until it comes, lengths, flow."""
    stage = FlowStage(pages=10, step_tokens=32, batching=batching, step_s=0.05)
    batch: set[str] = set()
    for number, (steps, prompt, answer, flow) in enumerate(work):
        for _ in range(steps):
            batch = _step(stage, batch)
            assert len(batch) <= batching.size
        stage.submit(f"{number}", prompt, answer, flow=b"%d" % flow)
    for _ in range(2000):
        if not stage.sequences:
            break
        batch = _step(stage, batch)
        assert len(batch) <= batching.size
    assert len(stage.done) == len(work)
    stage.check()


def _step(stage: FlowStage, batch: set[str]) -> set[str]:
    """One step of this batch, or of the next one if it has ended; the names of those in it."""
    before = len(stage.started)
    ended = not batch & stage.sequences.keys()
    stage.step()
    began = set(stage.started[before:])
    if ended:
        waiting = {each.request.request_id for each in stage.scheduler.waiting}
        return began | running(stage) | waiting
    assert began <= batch
    return batch


@pytest.mark.parametrize(
    "batching",
    [
        CONTINUOUS,
        Batching(BatchingMode.DYNAMIC, size=3, window_s=0.005),
        Batching(BatchingMode.STATIC, size=4, window_s=0.02),
    ],
    ids=lambda each: each.mode,
)
def test_answers_are_the_same_in_every_mode(batching):
    rng = random.Random(3)
    prompts = [[rng.randrange(90) for _ in range(rng.randrange(5, 120))] for _ in range(10)]
    answers = [rng.randrange(1, 40) for _ in prompts]
    collector = Collector()
    options = EngineOptions(max_context=256, max_running=4, step_tokens=64, batching=batching)
    engine = Engine(MockExecutor(64, 16), frozenset(), options, collector)
    engine.start()
    try:
        names = [str(number) for number in range(len(prompts))]
        work = zip(names, prompts, answers, strict=True)
        run_all(engine, collector, [request(*each) for each in work])
        for name, prompt, answer in zip(names, prompts, answers, strict=True):
            assert collector.outcomes[name].token_ids == expected_text(prompt, answer)
        engine.check_integrity()
        most = max(report.sequences for report in collector.reports)
        assert most == (4 if batching.continuous else batching.size)
    finally:
        engine.close()


def test_who_waits_for_a_batch_is_counted_and_can_leave():
    collector = Collector()
    options = EngineOptions(max_context=256, max_running=4, step_tokens=64, batching=STATIC)
    engine = Engine(MockExecutor(64, 16), frozenset(), options, collector)
    engine.start()
    try:
        engine.submit(request("a", [1, 2, 3], 2))
        stats = engine.call(engine.stats)
        assert (stats.waiting, stats.running, stats.pending_tokens) == (1, 0, 3)
        engine.abort("a")
        collector.wait(["a"])
        assert engine.call(engine.stats).waiting == 0
    finally:
        engine.close()
