"""Less urgent classes move under permanent load of more urgent work, by a small share."""

from __future__ import annotations

import pytest

from gateway.dispatch.warmer import WARM_UP_PRIORITY
from policies.floors import FLOOR_SHARE
from tests.engine.flow_stage import FlowStage

URGENT, STANDARD, BATCH = 0, 1, 2


class Pressure:
    """There is always more urgent work than fits."""

    def __init__(
        self,
        stage: FlowStage,
        prompt: int,
        answer: int,
        *,
        waiting: int = 4,
        priority: int = URGENT,
    ) -> None:
        self.stage = stage
        self._shape = (prompt, answer)
        self._waiting = waiting
        self._count = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            waiting = sum(each.rank.priority == URGENT for each in self.stage.scheduler.waiting)
            for _ in range(self._waiting - waiting):
                self.stage.submit(f"urgent {self._count}", *self._shape, priority=URGENT)
                self._count += 1
            self.stage.step()


@pytest.mark.parametrize(
    ("prompt", "answer"), [(20, 40), (200, 4), (64, 64)], ids=["streams", "prompts", "both"]
)
def test_batch_gets_its_floor_and_little_more(prompt, answer):
    """Slots are short in one case, the tokens of a step in another."""
    stage = FlowStage(max_running=8, step_tokens=64)
    pressure = Pressure(stage, prompt, answer)
    pressure.run(20)
    for index in range(80):
        stage.submit(f"batch {index}", 60, 30, priority=BATCH)
    pressure.run(1500)
    share = stage.served[BATCH] / stage.served[URGENT]
    assert FLOOR_SHARE * 0.8 < share < FLOOR_SHARE * 1.2
    assert len([name for name in stage.done if name.startswith("batch")]) > 5
    stage.check()


def test_every_class_behind_has_a_floor_of_its_own():
    stage = FlowStage(max_running=8, step_tokens=64)
    pressure = Pressure(stage, 60, 20)
    for index in range(60):
        stage.submit(f"standard {index}", 60, 30, priority=STANDARD)
        stage.submit(f"batch {index}", 60, 30, priority=BATCH)
    pressure.run(1500)
    for priority in (STANDARD, BATCH):
        assert stage.served[priority] / stage.served[URGENT] > FLOOR_SHARE * 0.8


def test_what_nobody_asked_for_has_no_floor():
    stage = FlowStage(max_running=4, step_tokens=64)
    pressure = Pressure(stage, 100, 4)
    pressure.run(5)
    stage.submit("copy", 100, 1, priority=WARM_UP_PRIORITY)
    pressure.run(1500)
    assert "copy" not in stage.started


def test_without_anybody_held_back_nothing_is_earned():
    stage = FlowStage(max_running=4, step_tokens=64)
    pressure = Pressure(stage, 60, 10)
    pressure.run(500)
    stage.submit("batch", 60, 30, priority=BATCH)
    stage.step()
    assert not any(stage.scheduler._floors.due())


def test_who_is_preempted_again_and_again_still_ends():
    """Urgent work comes in waves that each take every slot; what is computed in between is lost
    from the cache, which is as small as can be."""
    stage = FlowStage(pages=40, max_running=4, step_tokens=64)
    stage.submit("batch", 200, 100, priority=BATCH)
    waves = 0
    for wave in range(400):
        for index in range(8):
            stage.submit(f"urgent {wave} {index}", 100, 10)
        waves += 1
        while any(each.rank.priority == URGENT for each in stage.sequences.values()):
            stage.step()
        stage.run(1)  # a gap
        if "batch" in stage.done:
            break
    assert "batch" in stage.done
    assert waves < 100
    stage.finish()


def test_each_turn_brings_something_new():
    stage = FlowStage(pages=40, max_running=2, step_tokens=64)
    pressure = Pressure(stage, 120, 30, waiting=3)
    pressure.run(5)
    batch = stage.submit("batch", 150, 120, priority=BATCH)
    begun = preempted = 0
    charged = 0
    was_running = False
    while "batch" in stage.sequences:
        pressure.run(1)
        running = batch.slot is not None
        if running and not was_running:
            begun += 1
            charged = batch.charged
        if was_running and not running and "batch" in stage.sequences:
            preempted += 1
            assert batch.charged > charged
        was_running = running
        assert begun < 30
    assert begun == preempted + 1
    stage.finish()


def test_the_most_urgent_give_no_slot_up_for_a_turn():
    stage = FlowStage(max_running=4, step_tokens=64)
    pressure = Pressure(stage, 40, 20)
    for index in range(50):
        stage.submit(f"batch {index}", 40, 20, priority=BATCH)
    running: dict[str, bool] = {}
    for _ in range(900):
        pressure.run(1)
        for name, sequence in stage.sequences.items():
            if name.startswith("urgent"):
                assert sequence.slot is not None or not running.get(name)
                running[name] = sequence.slot is not None
    assert stage.served[BATCH]


def test_a_turn_takes_only_a_part_of_a_step_from_urgent_prompts():
    stage = FlowStage(max_running=16, step_tokens=64)
    pressure = Pressure(stage, 200, 2)
    pressure.run(5)
    stage.submit("batch", 2000, 4, priority=BATCH)
    computed = []
    for _ in range(900):
        before = stage.served[BATCH]
        pressure.run(1)
        computed.append(stage.served[BATCH] - before)
    assert 0 < max(computed) <= 64 // 4


def test_a_long_batch_prompt_starts_though_its_pages_are_never_free_at_once():
    """Short urgent ones hold most of the pages, and more of them wait, all the time."""
    stage = FlowStage(pages=64, max_running=8, step_tokens=128)
    pressure = Pressure(stage, 90, 20)
    pressure.run(30)
    stage.submit("long", 900, 4, priority=BATCH)
    stage.submit("long too", 900, 4, priority=BATCH)
    steps = closed = 0
    while "long too" in stage.sequences:
        pressure.run(1)
        steps += 1
        closed += stage.scheduler._floors._door_closed
        assert steps < 4000
    assert stage.done.index("long") < stage.done.index("long too")
    assert 0 < closed < steps * 0.06
    stage.check()


def test_in_gaps_batch_has_everything_and_gives_it_back_at_once():
    stage = FlowStage(max_running=4, step_tokens=64)
    for index in range(8):
        stage.submit(f"batch {index}", 30, 100, priority=BATCH)
    stage.run(10)
    assert len(stage.scheduler.running) == 4
    for index in range(4):
        stage.submit(f"urgent {index}", 10, 5)
    stage.step()
    assert {each.rank.priority for each in stage.scheduler.running} == {URGENT}
    stage.finish()
