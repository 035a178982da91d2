"""Any mix of flows, weights, classes, deadlines, targets and aborts: all ends, the books balance,
and nobody less urgent computes a prompt while somebody more urgent is kept waiting."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.flow_stage import FlowStage

PAGES, MAX_RUNNING, STEP_TOKENS = 24, 4, 48


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(pages=st.sampled_from([PAGES, 4 * PAGES]))
    def build(self, pages):
        self.stage = FlowStage(
            pages=pages, max_running=MAX_RUNNING, step_tokens=STEP_TOKENS, step_s=1.0
        )
        self.count = 0

    @rule(
        prompt=st.integers(1, 40) | st.integers(100, 300),
        answer=st.integers(1, 60),
        flow=st.sampled_from([b"a", b"b", b"c"]),
        weight=st.sampled_from([0.25, 1.0, 1.0, 4.0]),
        priority=st.sampled_from([0, 1, 2, 2, 1000]),
        due_in_s=st.sampled_from([None, 0.0, 3.0, 50.0]),
        tpot_s=st.sampled_from([None, None, 0.012, 0.03]),
    )
    def ask(self, prompt, answer, flow, weight, priority, due_in_s, tpot_s):
        self.count += 1
        self.stage.submit(
            str(self.count),
            prompt,
            answer,
            flow=flow,
            weight=weight,
            priority=priority,
            deadline_s=None if due_in_s is None else self.stage.now_s + due_in_s,
            tpot_s=tpot_s,
        )

    @rule(times=st.sampled_from([1, 1, 2, 5, 30]))
    def steps(self, times):
        for _ in range(times):
            self.step()

    @precondition(lambda self: self.stage.sequences)
    @rule(data=st.data())
    def leave(self, data):
        self.stage.abort(data.draw(st.sampled_from(sorted(self.stage.sequences))))

    def step(self):
        stage, scheduler = self.stage, self.stage.scheduler
        sequences = stage.sequences.copy()
        own_turn = {name for name, each in sequences.items() if each.turn}
        computed = stage.step()
        assert computed or not sequences
        closed = scheduler._floors._door_closed
        kept_waiting = min(scheduler.waiting.priorities, default=1 << 40)
        for name, tokens in computed.items():
            sequence = sequences[name]
            if tokens > 1 and sequence.rank.priority > kept_waiting:
                assert closed or sequence.turn or name in own_turn

    @invariant()
    def books_agree(self):
        if hasattr(self, "stage"):
            self.stage.check()

    def teardown(self):
        if hasattr(self, "stage"):
            work = sum(
                each.known + each.request.params.max_tokens
                for each in self.stage.sequences.values()
            )
            for _ in range(40 + 4 * work):
                if not self.stage.sequences:
                    break
                self.step()
            self.stage.finish(0)
            counters = self.stage.scheduler._meter._counters.values()
            assert not any(each._waiting for each in counters)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
