"""A long step is put aside for who is more urgent, and nobody loses anything by it."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.identity import CacheIdentity
from engine.caching import CacheOptions, device_only, tiers_opener
from engine.engine import Engine, EngineOptions
from engine.pausing import Allowance
from engine.request import FinishReason
from policies.floors import ClassFloors
from tests.cache.redis_blocks import until
from tests.engine.flow_stage import FlatCost, FlowStage
from tests.engine.harness import Collector, request
from tests.engine.mock_executor import MockExecutor, expected_text
from tests.engine.pausing_watch import watch_beside
from tests.engine.tiered_engines import ConstantCost

URGENT, PATIENT = 0, 2
IDENTITY = CacheIdentity("mock", "", "int32", "token-ids", 16, "tp1")


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(90) for _ in range(length)]


class Stage:
    """An engine on a mock whose layers a test can act in, on the engine's own thread."""

    def __init__(self, blocks: int = 64, *, dram_blocks: int = 0, **options: int) -> None:
        """With `dram_blocks` there is DRAM for about so many, to which all that is complete is
        copied, and from which it always pays to load."""
        chosen = {"max_context": 256, "max_running": 8, "step_tokens": 128, **options}
        self.collector = Collector()
        self.executor = MockExecutor(blocks)
        cost = ConstantCost(token_flops=1e9, weight_bytes=1e9, kv_token_bytes=4.0, block_bytes=64)
        dram_bytes = dram_blocks * 2 * int(self.executor.pages.shape[1])
        below = CacheOptions(dram_bytes=dram_bytes, write_through=True, ahead_tokens=64)
        self.engine = Engine(
            self.executor,
            frozenset(),
            EngineOptions(**chosen),
            self.collector,
            tiers_opener(cost, IDENTITY, below) if dram_blocks else device_only,
        )
        self.texts: dict[str, list[int]] = {}
        self._layers = 0

    def submit(
        self, name: str, length: int, tokens: int = 4, *, common: int = 0, **terms: int
    ) -> None:
        """The first `common` tokens of the prompt are everybody's."""
        start = (prompt(99, common) + prompt(len(self.texts), length))[:length]
        self.texts[name] = expected_text(start, tokens)
        self.engine.submit(request(name, start, tokens, **terms))

    def in_layer(self, number: int, act: Callable[[], None]) -> None:
        """Do something in that layer, counted from 0 over all steps that can be put aside."""

        def count(_: int) -> None:
            self._layers += 1
            if self._layers == number + 1:
                act()

        self.executor.in_layer = count

    def run(self) -> None:
        """Until everybody is served, as a lone cold run would serve him."""
        self.engine.start()
        self.collector.wait(["patient"])
        self.collector.wait(self.texts)
        for name, text in self.texts.items():
            assert self.collector.outcomes[name].token_ids == text, name
        self.check()

    def check(self) -> None:
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.pages_held) == (0, 0, 0)

    def first_tokens(self) -> list[str]:
        """Who got a first token, in that order."""
        told = [each.request_id for report in self.collector.reports for each in report.outputs]
        return list(dict.fromkeys(told))


@pytest.fixture
def stages():
    opened: list[Stage] = []

    def build(*args: int, **options: int) -> Stage:
        opened.append(Stage(*args, **options))
        return opened[-1]

    yield build
    for stage in opened:
        stage.engine.close()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_who_is_more_urgent_comes_first_and_the_step_goes_on(stages, layer):
    stage = stages()
    stage.submit("patient", 200, priority=PATIENT)
    stage.in_layer(layer, lambda: stage.submit("urgent", 20, priority=URGENT))
    stage.run()
    assert stage.executor.pauses == [layer]
    assert stage.executor.steps[:3] == [(20, 1), (128, 1), (73, 2)]
    assert stage.first_tokens() == ["urgent", "patient"]


def test_after_the_last_layer_the_step_is_not_put_aside(stages):
    stage = stages()
    stage.submit("patient", 200, priority=PATIENT)
    stage.in_layer(3, lambda: stage.submit("urgent", 20, priority=URGENT))
    stage.run()
    assert stage.executor.pauses == []
    assert stage.executor.steps[0] == (128, 1)


def test_one_step_can_be_put_aside_several_times(stages):
    stage = stages()
    stage.submit("patient", 200, priority=PATIENT)
    names = iter(("first", "second", "third"))
    stage.executor.in_layer = lambda _: (
        stage.submit(name, 20, priority=URGENT) if (name := next(names, None)) else None
    )
    stage.run()
    assert stage.executor.pauses == [0, 1, 2]
    assert stage.executor.steps[:4] == [(20, 1), (21, 2), (22, 3), (128, 1)]


@pytest.mark.parametrize("priority", [PATIENT, PATIENT + 1])
def test_who_is_not_more_urgent_waits(stages, priority):
    stage = stages()
    stage.submit("patient", 200, priority=PATIENT)
    stage.in_layer(1, lambda: stage.submit("other", 20, priority=priority))
    stage.run()
    assert stage.executor.pauses == []
    assert stage.executor.steps[0] == (128, 1)


def test_a_step_with_a_prompt_as_urgent_is_not_put_aside(stages):
    stage = stages()
    stage.submit("patient", 200, priority=PATIENT)
    stage.submit("before", 40, priority=URGENT)
    stage.in_layer(1, lambda: stage.submit("urgent", 20, priority=URGENT))
    stage.run()
    assert stage.executor.pauses == []


def test_a_short_step_is_not_put_aside(stages):
    stage = stages()
    stage.submit("patient", 31, tokens=9, priority=PATIENT)
    stage.in_layer(1, lambda: stage.submit("urgent", 20, priority=URGENT))
    stage.engine.start()
    stage.collector.wait(["patient"])
    assert stage.executor.pauses == []
    assert list(stage.texts) == ["patient"]  # no step of it could be put aside
    stage.check()


def test_what_runs_beside_is_bounded_by_a_step_of_tokens(stages):
    stage = stages()
    stage.submit("patient", 200, priority=PATIENT)

    def many_come() -> None:
        for n in range(4):
            stage.submit(f"urgent{n}", 50, priority=URGENT)

    stage.in_layer(1, many_come)
    stage.run()
    assert stage.executor.steps[:2] == [(100, 2), (128, 1)]


def test_what_runs_beside_is_bounded_by_a_few_steps(stages):
    stage = stages(max_running=16)
    stage.submit("patient", 200, priority=PATIENT)
    forward, come = stage.executor.forward, iter(range(4))

    def forward_and_one_more_comes(batch):
        if (n := next(come, None)) is not None:
            stage.submit(f"late{n}", 3, priority=URGENT)
        return forward(batch)

    stage.executor.forward = forward_and_one_more_comes
    stage.in_layer(1, lambda: stage.submit("urgent", 3, priority=URGENT))
    stage.run()
    assert stage.executor.steps[:5] == [(3, 1), (4, 2), (5, 3), (6, 4), (128, 1)]


def test_a_prompt_that_would_not_be_through_is_not_begun(stages):
    stage = stages()
    stage.submit("patient", 200, priority=PATIENT)
    stage.in_layer(1, lambda: stage.submit("urgent", 129, priority=URGENT))
    stage.run()
    assert stage.executor.pauses == [1]
    assert stage.executor.steps[0] == (128, 1)


def test_no_slot_is_taken_from_the_step_that_lies_aside(stages):
    stage = stages(max_running=1)
    stage.submit("patient", 200, priority=PATIENT)
    stage.in_layer(1, lambda: stage.submit("urgent", 20, priority=URGENT))
    stage.run()
    assert stage.executor.pauses == []  # it would be in vain
    assert stage.executor.steps[:2] == [(128, 1), (20, 1)]
    assert stage.engine.stats().preemptions == 1  # afterwards


def test_a_slot_that_comes_free_beside_is_somebody_elses_at_once(stages):
    """The stream has its last token with the first newcomer's, and the second one its slot, for
    whom the step pauses again; what is left of the step still writes to the stream's page."""
    stage = stages(max_running=3)
    stage.submit("stream", 20, tokens=2, priority=PATIENT)
    stage.submit("patient", 200, priority=PATIENT)
    names = iter((None,) * 4 + ("first", "second"))
    stage.executor.in_layer = lambda _: (
        stage.submit(name, 20, tokens=9, priority=URGENT) if (name := next(names, None)) else None
    )
    seen: Counter[str] = Counter()
    watch_beside(stage.engine, seen)
    stage.run()
    assert stage.executor.pauses == [0, 1]
    assert seen == {"gone on": 1, "ended": 1, "slot": 1}


def test_who_is_left_of_a_failed_step_is_tried_alone(stages):
    """The stream has gone on without it, but may have been the culprit."""
    stage = stages()
    stage.submit("stream", 20, tokens=2, priority=PATIENT)
    stage.submit("patient", 200, priority=PATIENT)
    layers = iter(range(100))

    def act(_: int) -> None:
        layer = next(layers)
        if layer == 4:
            stage.submit("urgent", 20, priority=URGENT)
        elif layer == 5:
            raise RuntimeError("the second half failed")

    stage.executor.in_layer = act
    stage.run()
    assert stage.executor.pauses == [0]
    assert stage.executor.steps[:3] == [(128, 2), (21, 2), (92, 1)]


def test_pauses_in_vain_are_counted(stages, monkeypatch):
    """However many come who cannot begin, the step goes on."""
    monkeypatch.setattr("engine.engine.Allowance", partial(Allowance, steps=2))
    stage = stages(max_running=16)
    stage.submit("patient", 100, priority=PATIENT)
    names = iter(("first", "second", "third"))
    stage.executor.in_layer = lambda _: (
        stage.submit(name, 129, priority=URGENT) if (name := next(names, None)) else None
    )
    stage.run()
    assert stage.executor.pauses == [0, 1]
    assert stage.executor.steps[0] == (100, 1)


def test_no_page_is_taken_from_the_step_that_lies_aside(stages):
    stage = stages(blocks=16)
    stage.submit("patient", 240, priority=PATIENT)
    stage.in_layer(1, lambda: stage.submit("urgent", 100, priority=URGENT))
    stage.run()
    assert stage.executor.pauses == [1]
    assert stage.executor.steps[:2] == [(128, 1), (100, 1)]
    assert stage.engine.stats().preemptions == 1  # afterwards


def test_an_abort_of_who_lies_aside_waits_for_the_step(stages):
    stage = stages()
    stage.submit("patient", 200, priority=PATIENT)

    def act() -> None:
        stage.engine.abort("patient")
        stage.submit("urgent", 20, priority=URGENT)

    stage.in_layer(1, act)
    stage.engine.start()
    stage.collector.wait(["patient", "urgent"])
    assert stage.executor.steps[:2] == [(20, 1), (128, 1)]
    assert stage.collector.outcomes["patient"].finish is FinishReason.ABORT
    assert stage.collector.outcomes["urgent"].token_ids == stage.texts["urgent"]
    stage.check()


def test_a_step_that_fails_beside_fails_alone(stages):
    stage = stages()
    stage.submit("patient", 200, priority=PATIENT)
    stage.executor.poison = 96

    def act() -> None:
        stage.engine.submit(request("bad", [5, 96], 3, priority=URGENT))
        stage.submit("urgent", 20, priority=URGENT)

    stage.in_layer(1, act)
    stage.run()
    stage.collector.wait(["bad"])
    assert stage.executor.pauses == [1]
    assert stage.collector.outcomes["bad"].error == "RuntimeError"
    assert stage.first_tokens()[-1] == "patient"


def test_a_step_that_fails_after_it_lay_aside_is_tried_again(stages):
    stage = stages()
    stage.submit("patient", 100, priority=PATIENT)
    stage.submit("other", 28, priority=PATIENT)

    def act(layer: int) -> None:
        if layer == 1:
            stage.submit("urgent", 20, priority=URGENT)
        elif layer == 2:
            stage.executor.in_layer = None
            raise RuntimeError("the second half failed")

    stage.executor.in_layer = act
    stage.run()
    assert stage.executor.pauses == [1]
    assert stage.executor.steps[:3] == [(20, 1), (100, 1), (28, 1)]


def test_closing_while_a_step_lies_aside_ends_everything(stages):
    stage = stages()
    stage.submit("patient", 200, priority=PATIENT)
    closing = threading.Thread(target=stage.engine.close)

    def act() -> None:
        stage.submit("urgent", 20, priority=URGENT)
        closing.start()
        with stage.engine._wake:
            assert stage.engine._wake.wait_for(lambda: stage.engine._stopping, 10.0)

    stage.in_layer(1, act)
    stage.engine.start()
    stage.collector.wait(["patient", "urgent"])
    closing.join()
    assert stage.executor.pauses == [1]
    assert stage.executor.steps == [(128, 1)]
    ends = {outcome.finish for outcome in stage.collector.outcomes.values()}
    assert ends == {FinishReason.ABORT}
    assert stage.executor.closed


def test_reports_tell_each_step_its_own_time_and_the_interrupted_one_teaches_nothing(
    stages, monkeypatch
):
    stage = stages()
    now_s = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now_s[0], monotonic=lambda: now_s[0])
    monkeypatch.setattr("engine.engine.time", clock)
    learned = []
    monkeypatch.setattr(
        stage.engine._cache.cost, "observe_step", lambda shape, s: learned.append(shape.tokens)
    )
    forward = stage.executor.forward

    def slow_forward(batch):
        now_s[0] += 10.0
        return forward(batch)

    def layer(number: int) -> None:
        now_s[0] += 1.0
        if number == 1 and "urgent" not in stage.texts:
            stage.submit("urgent", 20, tokens=1, priority=URGENT)

    stage.executor.forward = slow_forward
    stage.executor.in_layer = layer
    stage.submit("patient", 200, tokens=1, priority=PATIENT)
    stage.run()
    steps = [(each.tokens, each.seconds) for each in stage.collector.reports if each.sequences]
    assert steps == [(20, 10.0), (128, 4.0), (72, 4.0)]
    assert learned == [20, 72]
    assert stage.engine.stats().steps == 3


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_streams_do_not_wait_for_what_lies_aside(stages, layer, ends):
    """The stream has its second token with the urgent one's first, or its last; then the step goes
    on, on pages that are nobody else's until it is over."""
    stage = stages(blocks=18, step_tokens=64)
    stage.submit("stream", 20, tokens=2 if ends else 9, priority=URGENT)
    come = iter(range(2))
    forward = stage.executor.forward

    def forward_and_somebody_comes(batch):
        if (n := next(come, None)) == 0:
            stage.submit("patient", 200, priority=PATIENT)
        elif n == 1:
            stage.submit("next", 30, tokens=4, priority=URGENT)
        return forward(batch)

    stage.executor.forward = forward_and_somebody_comes
    stage.in_layer(layer, lambda: stage.submit("urgent", 20, tokens=1, priority=URGENT))
    stage.run()
    assert stage.executor.pauses == [layer]
    beside = (30, 1) if ends else (31, 2)
    assert stage.executor.steps[:4] == [(20, 1), (21, 2), beside, (64, 2)]
    told = [report.outputs for report in stage.collector.reports if report.sequences]
    names = [sorted(each.request_id for each in outputs) for outputs in told]
    assert names[:4] == [["stream"], ["stream", "urgent"], ["next"] + ["stream"] * (not ends), []]


def test_who_has_gone_on_without_a_step_goes_on_again(stages):
    stage = stages()
    stage.submit("stream", 20, tokens=9, priority=PATIENT)
    stage.submit("patient", 200, priority=PATIENT)
    names = iter((None,) * 4 + ("first", "second", "third"))
    stage.executor.in_layer = lambda _: (
        stage.submit(name, 20, priority=URGENT) if (name := next(names, None)) else None
    )
    stage.run()
    assert stage.executor.pauses == [0, 1, 2]
    assert stage.executor.steps[:5] == [(128, 2), (21, 2), (22, 3), (23, 4), (93, 2)]


def test_streams_wait_no_longer_than_their_target_for_who_comes():
    """A step takes 10 ms and 1 ms a token; of 100 ms, 90 may be predicted. One token is the
    stream's."""
    for length, beside in ((79, 80), (80, 0)):
        stage = FlowStage(step_tokens=100)
        stage.submit("stream", 16, max_tokens=9, priority=URGENT, tpot_s=0.1)
        stage.step()
        stage.submit("patient", 500, priority=PATIENT)
        chunks = stage.scheduler.schedule()
        assert [chunk.tokens for chunk in chunks] == [1, 79]
        stage.submit("urgent", length, priority=URGENT)
        with stage.scheduler.put_aside(chunks):
            planned = stage.scheduler.schedule_beside(PATIENT, 100)
            assert sum(chunk.tokens for chunk in planned) == beside


def test_streams_that_are_ahead_of_their_target_wait_longer():
    """A target of 200 ms between tokens is one on the mean: with the sixth of six steps of 100 ms,
    the first of which began the pace, a stream's next token is due in 700 ms. Of these, 630 may be
    predicted."""
    for length, beside in ((619, 620), (620, 0)):
        stage = FlowStage(step_tokens=100, step_s=0.1)
        stage.submit("stream", 16, max_tokens=9, priority=URGENT, tpot_s=0.2)
        for _ in range(6):
            stage.step()
        stage.submit("patient", 500, priority=PATIENT)
        chunks = stage.scheduler.schedule()
        stage.submit("urgent", length, priority=URGENT)
        with stage.scheduler.put_aside(chunks):
            planned = stage.scheduler.schedule_beside(PATIENT, 700)
            assert sum(chunk.tokens for chunk in planned) == beside


@pytest.mark.parametrize(("late_s", "tokens"), [(0.0, 169), (0.05, 124), (0.1, 79), (9.0, 79)])
def test_a_stream_that_is_behind_makes_up_for_it_in_shorter_steps(late_s, tokens):
    """A step takes 10 ms and 1 ms a token; 90 % of some 200 ms between two tokens, less what it is
    behind, may be predicted, but not less than of half of it."""
    stage = FlowStage(step_tokens=250, step_s=0.2005)
    stage.submit("stream", 16, max_tokens=99, priority=URGENT, tpot_s=0.2005)
    stage.step()
    stage.step()
    stage.now_s += late_s
    stage.step()
    stage.submit("patient", 500, priority=PATIENT)
    assert [chunk.tokens for chunk in stage.scheduler.schedule()] == [1, tokens]


@pytest.mark.parametrize(("alone_s", "tokens"), [(0.06, 29), (0.01, 34), (0.082, 16), (0.1, 100)])
def test_who_cannot_catch_up_has_no_longer_steps_for_it(alone_s, tokens):
    """A step takes `alone_s` and 1 ms a token. Where that alone is more than 90 % of the half of
    100 ms, prompts get an eighth of 800 tokens at most, and what fits into 90 ms; where it is more
    than these, an eighth."""
    stage = FlowStage(step_tokens=800, step_s=0.1, cost=FlatCost(alone_s, 0.001))
    stage.submit("stream", 16, max_tokens=99, tpot_s=0.1)
    stage.step()
    stage.now_s += 1.0
    stage.step()
    stage.submit("patient", 500, priority=PATIENT)
    assert [chunk.tokens for chunk in stage.scheduler.schedule()] == [1, tokens]


def test_who_makes_up_for_something_lets_an_eighth_in_at_most():
    """Of 800 tokens, which 1000 ms would have room for."""
    stage = FlowStage(step_tokens=800, step_s=1.0, cost=FlatCost(0.5, 0.001))
    stage.submit("stream", 16, max_tokens=99, tpot_s=1.0)
    stage.step()
    stage.now_s += 5.0
    stage.step()
    stage.submit("patient", 500, priority=PATIENT)
    assert [chunk.tokens for chunk in stage.scheduler.schedule()] == [1, 100]


def test_a_step_is_over_when_the_first_stream_wants_its_next_token():
    """A step takes 10 ms and 1 ms a token; of 180 ms that are left of 200, 162 may be predicted."""
    stage = FlowStage(step_tokens=200, step_s=0.01)
    stage.submit("stream", 16, max_tokens=9, priority=URGENT, tpot_s=0.2)
    stage.step()
    stage.now_s += 0.02
    stage.submit("patient", 500, priority=PATIENT)
    assert [chunk.tokens for chunk in stage.scheduler.schedule()] == [1, 151]


@pytest.mark.parametrize("closed", [True, False])
def test_nobody_is_let_in_beside_a_step_that_is_closed_to_all(monkeypatch, closed):
    """A class whose long prompt finds no pages may close the door to the others."""
    stage = FlowStage(pages=16, step_tokens=64)
    stage.submit("standard", 100, priority=1)
    stage.step()
    stage.submit("patient", 240, priority=PATIENT)
    monkeypatch.setattr(ClassFloors, "due", lambda _: [PATIENT])
    monkeypatch.setattr(ClassFloors, "closes_door", lambda *_: closed)
    chunks = stage.scheduler.schedule()
    assert [chunk.tokens for chunk in chunks] == [36]
    stage.submit("urgent", 20, priority=URGENT)
    with stage.scheduler.put_aside(chunks):
        planned = stage.scheduler.schedule_beside(1, 64)
    assert [chunk.tokens for chunk in planned] == ([] if closed else [20])


def test_a_stream_without_a_page_waits_for_the_step_that_lies_aside():
    """Its first token beside it has a page, its second one would need another; nobody is preempted
    for it, and it is served when the step is over."""
    stage = FlowStage(pages=12, step_tokens=64)
    stream = stage.submit("stream", 15, max_tokens=9, priority=URGENT)
    stage.step()
    stage.submit("patient", 100, priority=PATIENT)
    chunks = stage.scheduler.schedule()
    stage.submit("urgent", 10, priority=URGENT)
    with stage.scheduler.put_aside(chunks):
        for chunk in stage.scheduler.schedule_beside(PATIENT, 64):
            stage._take(chunk)
        assert stream.known == 17
        pool = stage.cache.device
        taken = pool.take(pool.available())
        stage.submit("late", 5, priority=URGENT)
        assert stage.scheduler.schedule_beside(PATIENT, 53) == []
        pool.release(taken)
    stage._take(next(each for each in chunks if each.sequence is not stream))
    assert stage.scheduler.preemptions == 0
    assert stage.step()["stream"] == 1
    stage.finish()


@pytest.mark.parametrize("ends", [True, False])
def test_pages_of_who_goes_on_are_nobody_elses(ends):
    """Even where they are erased, and whatever comes: until the step is over, and not longer."""
    stage = FlowStage(pages=12, step_tokens=64)
    stream = stage.submit("stream", 15, max_tokens=2 if ends else 9, priority=URGENT)
    stage.step()
    stage.submit("patient", 100, priority=PATIENT)
    chunks = stage.scheduler.schedule()
    stage.submit("urgent", 10, max_tokens=1, priority=URGENT)
    own = stream.pages.copy()
    with stage.scheduler.put_aside(chunks):
        for chunk in stage.scheduler.schedule_beside(PATIENT, 64):
            stage._take(chunk)
        assert ("stream" in stage.done) is ends
        assert stage.cache.device.key_of(own[0]) is not None  # it is full, and can be found
        stage.cache.erase(None, None)
        pool = stage.cache.device
        taken = pool.take(pool.available())
        assert not {*own} & {*taken}
        pool.release(taken)
        stage.cache.check_integrity()
    assert stage.cache.device.evictable_among(own) == ends
    stage._take(next(each for each in chunks if each.sequence is not stream))
    stage.finish()


def test_who_lies_aside_cannot_be_removed():
    stage = FlowStage()
    patient = stage.submit("patient", 200, priority=PATIENT)
    chunks = stage.scheduler.schedule()
    with stage.scheduler.put_aside(chunks), pytest.raises(AssertionError):
        stage.scheduler.remove(patient)
    stage.abort("patient")
    stage.check()


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 40),  # the layer in which it comes
        st.integers(1, 120),  # prompt tokens
        st.integers(0, 80),  # of which these are everybody's
        st.integers(1, 6),  # answer tokens
        st.sampled_from([0, 1, 2]),  # priority
        st.booleans(),  # aborted in the next layer
    ),
    min_size=1,
    max_size=12,
)


@given(arrivals=ARRIVALS)
@settings(max_examples=40, deadline=None)
def test_no_pause_changes_a_text(arrivals):
    stage = Stage(blocks=20, max_running=4, step_tokens=64)
    shared = prompt(99, 80)
    jobs: dict[str, tuple[list[int], int]] = {}
    plan: dict[int, list[Callable[[], None]]] = {}
    for n, (layer, length, common, tokens, priority, aborted) in enumerate(arrivals):
        name, start = f"r{n}", (shared[:common] + prompt(n, 120))[:length]
        jobs[name] = (start, tokens)
        each = request(name, start, tokens, priority=priority)
        plan.setdefault(layer, []).append(partial(stage.engine.submit, each))
        if aborted:
            plan.setdefault(layer + 1, []).append(partial(stage.engine.abort, name))
    layers = iter(range(1000))

    def act(_: int) -> None:
        for do in plan.pop(next(layers), []):
            do()

    def give_up_plan() -> list[Callable[[], None]]:
        stage.executor.in_layer = None
        return [do for _, rest in sorted(plan.items()) for do in rest]

    stage.executor.in_layer = act
    stage.submit("patient", 200, priority=PATIENT)
    stage.engine.start()
    stage.collector.wait(["patient"])
    for do in stage.engine.call(give_up_plan):
        do()
    stage.collector.wait(jobs)
    for name, (start, tokens) in jobs.items():
        outcome, text = stage.collector.outcomes[name], expected_text(start, tokens)
        if outcome.finish is FinishReason.ABORT:
            text = text[: len(outcome.token_ids)]
        assert outcome.token_ids == text, name
    assert stage.collector.outcomes["patient"].token_ids == stage.texts["patient"]
    stage.check()
    stage.engine.close()


STREAMS = st.lists(
    st.tuples(
        st.sampled_from([1, 14, 15, 16]),  # prompt tokens
        st.integers(2, 6),  # answer tokens
        st.sampled_from([0, 1, 2]),
    ),
    min_size=2,
    max_size=3,
)
NEWCOMERS = st.lists(
    st.tuples(
        st.integers(4, 16),  # the layer in which it comes: the first four are of streams' prompts
        st.integers(1, 40),
        st.sampled_from([0, 32]),  # of which everybody has these
        st.integers(2, 4),
        st.sampled_from([0, 0, 1]),
        st.sampled_from(["served", "served", "served", "aborted", "fails"]),
    ),
    min_size=4,
    max_size=8,
)
POISON = 1000


def test_no_pause_changes_a_stream():
    """Streams are in the step that lies aside, go on beside it and end there, their slots are
    somebody else's, prompts fail beside it or are loaded from DRAM meanwhile, blocks are copied
    there, and what is left of the step fails, all that on few pages. That this is what happens is
    counted."""
    seen: Counter[str] = Counter()
    of_interest = ("gone on", "ended", "failed", "loads")

    @given(
        streams=STREAMS,
        newcomers=NEWCOMERS,
        blocks=st.integers(17, 21),
        fails=st.integers(0, 3),
        dram_blocks=st.sampled_from([0, 30, 200]),
    )
    @settings(max_examples=40, deadline=None)
    def check(streams, newcomers, blocks, fails, dram_blocks):
        stage = Stage(blocks, dram_blocks=dram_blocks, max_running=len(streams) + 2, step_tokens=48)
        watch_beside(stage.engine, seen)
        stage.executor.poison = POISON
        plan: dict[int, list[Callable[[], None]]] = {}
        bad: list[str] = []
        for n, (layer, length, common, tokens, priority, fate) in enumerate(newcomers):
            act = partial(stage.submit, f"r{n}", length, tokens, common=common, priority=priority)
            if fate == "fails":
                bad.append(f"r{n}")
                poisoned = request(f"r{n}", [*prompt(n, length), POISON], 3, priority=priority)
                act = partial(stage.engine.submit, poisoned)
            plan.setdefault(layer, []).append(act)
            if fate == "aborted":
                plan.setdefault(layer + 1, []).append(partial(stage.engine.abort, f"r{n}"))
        layers = iter(range(1000))
        without = iter(range(1000))  # layers of steps without which streams have gone on

        def act_in_layer(_: int) -> None:
            layer = next(layers)
            for act in plan.pop(layer, []):
                act()
            if stage.engine._scheduler._gone_on and next(without) == fails:
                seen["failed"] += 1
                raise RuntimeError("half a step failed")

        def give_up_plan() -> list[Callable[[], None]]:
            stage.executor.in_layer = None
            return [act for _, rest in sorted(plan.items()) for act in rest]

        def begin() -> None:
            stage.executor.in_layer = act_in_layer
            for n, (length, tokens, priority) in enumerate(streams):
                stage.submit(f"stream{n}", length, tokens, priority=priority)
            stage.submit("patient", 200, priority=PATIENT)

        with closing(stage.engine):
            stage.engine.start()
            if dram_blocks:  # what is everybody's is there, and nowhere else
                for name, length in (("warm", 40), ("other", 220), ("another", 220)):
                    stage.submit(name, length, 1, common=32 if name == "warm" else 0)
                    stage.collector.wait([name])
            stage.engine.call(begin)
            stage.collector.wait(["patient"])
            for act in stage.engine.call(give_up_plan):
                act()
            stage.collector.wait([*stage.texts, *bad])
            for name, text in stage.texts.items():
                outcome = stage.collector.outcomes[name]
                if outcome.finish is FinishReason.ABORT:
                    text = text[: len(outcome.token_ids)]
                assert outcome.token_ids == text, name
            for name in bad:
                assert stage.collector.outcomes[name].finish is FinishReason.ERROR
            until(lambda: stage.engine.call(lambda: stage.engine._cache.quiet), timeout_s=30.0)
            stage.check()
            assert not stage.engine._scheduler._gone_on
            seen["loads"] += sum(each.loads for each in stage.engine.cache_stats().tiers)

    check()
    assert min(seen[each] for each in of_interest) >= 2, seen
