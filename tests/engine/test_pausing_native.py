"""Texts and log-probabilities of the native engine, whose steps are interrupted at any op."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decoder import build_program
from engine.engine import Engine, EngineOptions
from engine.executors.base import StepBatch
from engine.executors.native import NativeExecutor, NativeUnavailable
from engine.executors.native_build import find_compiler
from engine.executors.native_lowering import lower
from engine.request import EngineRequest
from tests.engine.harness import Collector, Outcome, request
from tests.engine.native_models import ARCHITECTURES, open_native, random_ids
from tests.engine.pausing_watch import watch_beside

try:
    find_compiler()
except NativeUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

ARCHITECTURE = ARCHITECTURES["gemma_like"]
OPS = len(lower(build_program(ARCHITECTURE)))


class Interrupted:
    """A native executor in whose n-th call that can pause something happens at a chosen op: the
    call goes on as it would if another thread had done it there."""

    def __init__(self, native: NativeExecutor) -> None:
        self.name, self.device, self.dtype = native.name, native.device, native.dtype
        self.kv_layout, self.block_tokens = native.kv_layout, native.block_tokens
        self.pages, self.forward, self.close = native.pages, native.forward, lambda: None
        self.plan: list[tuple[int, list[EngineRequest]]] = []
        self.engine: Engine
        self.undisturbed = 0  # so many steps that can pause come before
        self.pauses = 0
        self._native = native
        self._asked = False

    def start(self, batch: StepBatch) -> torch.Tensor | None:
        if self.undisturbed:
            self.undisturbed -= 1
            return self.forward(batch)
        return self._run(lambda: self._native.start(batch))

    def resume(self) -> torch.Tensor | None:
        return self._run(self._native.resume)

    def pause(self) -> None:
        self._asked = True

    def unpause(self) -> None:
        self._asked = False

    def give_up_plan(self) -> list[EngineRequest]:
        """Who was to come and has not yet. Between two steps."""
        plan, self.plan = self.plan, []
        return [each for _, requests in plan for each in requests]

    def _run(self, call) -> torch.Tensor | None:
        if self._asked:  # somebody came before it began
            self._native.pause()
        elif self.plan:
            self._native.pause(self.plan[0][0])
        else:
            self._native.unpause()
        logits = call()
        while logits is None and not self._asked:
            for each in self.plan.pop(0)[1]:
                self.engine.submit(each)
            if not self._asked:  # nobody for whom it gives way
                if self.plan:
                    self._native.pause(self.plan[0][0])
                else:
                    self._native.unpause()
                logits = self._native.resume()
        self.pauses += logits is None
        return logits


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16])
def native(request):
    executor = open_native(ARCHITECTURE, request.param, max_tokens=96)
    yield executor
    executor.close()


def serve(
    native: NativeExecutor,
    first: list[EngineRequest],
    plan: list[tuple[int, list[EngineRequest]]],
    later: list[EngineRequest],
    *,
    max_running: int = 4,
    undisturbed: int = 0,
    seen: Counter[str] | None = None,
) -> tuple[dict[str, Outcome], int]:
    """What comes of all of them, and how often a step lay aside; from an empty cache. `seen` is for
    `watch_beside`."""
    native.pages.zero_()
    executor, collector = Interrupted(native), Collector()
    options = EngineOptions(max_context=256, max_running=max_running, step_tokens=96)
    engine = executor.engine = Engine(executor, frozenset(), options, collector)
    if seen is not None:
        watch_beside(engine, seen)
    everybody = [*first, *(each for _, requests in plan for each in requests), *later]
    try:
        executor.plan, executor.undisturbed = plan, undisturbed
        for each in first:
            engine.submit(each)
        engine.start()
        collector.wait([each.request_id for each in first])
        engine.check_integrity()
        not_asked = engine.call(executor.give_up_plan)
        for each in [*not_asked, *later]:
            engine.submit(each)
        collector.wait([each.request_id for each in everybody])
        engine.check_integrity()
        assert engine.stats().pages_held == 0
    finally:
        engine.close()
    return collector.outcomes, executor.pauses


def ask(name: str, seed: int, length: int, priority: int, tokens: int = 4) -> EngineRequest:
    ids = [int(each) for each in random_ids(length, seed)]
    return request(name, ids, tokens, priority=priority, logprobs=2, temperature=0.8, seed=seed)


COMES = st.tuples(
    st.integers(0, OPS - 2),
    st.lists(st.tuples(st.integers(1, 90), st.sampled_from([0, 1, 2])), min_size=1, max_size=2),
)


@given(comes=st.lists(COMES, min_size=1, max_size=5))
@settings(max_examples=20, deadline=None)
def test_no_interruption_changes_a_bit(native, comes):
    patient = [ask("p0", 1, 200, 2), ask("p1", 2, 150, 2)]
    numbers = iter(range(100))
    plan = [
        (
            op,
            [
                ask(f"r{n}", 10 + n, length, priority)
                for length, priority in each
                if (n := next(numbers)) >= 0
            ],
        )
        for op, each in comes
    ]
    everybody = [each for _, requests in plan for each in requests]
    got, _ = serve(native, patient, list(plan), [])
    expected, pauses = serve(native, patient, [], everybody)
    assert pauses == 0
    assert {*got} == {*expected}
    for name, outcome in got.items():
        assert outcome.finish is not None
        assert outcome.token_ids == expected[name].token_ids, name
        assert outcome.logprobs == expected[name].logprobs, name


def test_an_interruption_at_every_op(native):
    """Each op once, spread over steps; all of the newcomers come to their first token beside."""
    expected, _ = serve(native, [ask("p", 1, 190, 2)], [], [ask("r", 3, 40, 0)])
    for op in range(0, OPS - 1, 3):
        outcomes, pauses = serve(native, [ask("p", 1, 190, 2)], [(op, [ask("r", 3, 40, 0)])], [])
        assert pauses == 1
        for name in "pr":
            assert outcomes[name].logprobs == expected[name].logprobs
            assert np.isfinite([each.logprob for each in outcomes[name].logprobs]).all()


KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "choice_index": 1, "top_p": 0.9},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 0.8, "stop_token_ids": frozenset(range(20)), "repetition_penalty": 1.3},
    {"temperature": 1.0, "prompt_logprobs": 1},
]


def ask_kind(name: str, kind: int, length: int, priority: int, tokens: int) -> EngineRequest:
    """One of a few requests, so that not many lone runs are needed; two of a kind share a
    beginning."""
    params = {"logprobs": 2, "seed": 7 + kind, **KINDS[kind]}
    ids = [int(each) for each in random_ids(240, kind)]
    return request(name, ids[:length], tokens, priority=priority, **params)


JOBS = st.tuples(
    st.integers(0, len(KINDS) - 1),
    st.sampled_from([1, 15, 16, 30]),  # prompt tokens
    st.sampled_from([2, 3, 4]),  # answer tokens
)


def test_streams_that_go_on_or_end_beside_say_what_they_say_alone(native):
    """Of any kind, wherever what they were in is interrupted; the newcomers, too, and the prompt
    whose step it is. Log-probabilities as well, to the bit."""
    seen: Counter[str] = Counter()
    alone: dict[tuple[int, ...], Outcome] = {}

    def lone(kind: int, length: int, tokens: int) -> Outcome:
        if (kind, length, tokens) not in alone:
            each = ask_kind("alone", kind, length, 2, tokens)
            alone[kind, length, tokens] = serve(native, [each], [], [])[0]["alone"]
        return alone[kind, length, tokens]

    @given(
        streams=st.lists(JOBS, min_size=2, max_size=3),
        newcomers=st.lists(st.tuples(st.integers(0, OPS - 2), JOBS), min_size=6, max_size=10),
    )
    @settings(max_examples=12, deadline=None)
    def check(streams, newcomers):
        jobs = {f"s{n}": job for n, job in enumerate(streams)}
        jobs["patient"] = (1, 240, 3)
        first = [ask_kind(name, *job[:2], 2, job[2]) for name, job in jobs.items()]
        plan = []
        for n, (op, job) in enumerate(newcomers):
            jobs[f"r{n}"] = job
            plan.append((op, [ask_kind(f"r{n}", *job[:2], 0, job[2])]))
        outcomes, _ = serve(
            native, first, plan, [], max_running=len(first) + 1, undisturbed=1, seen=seen
        )
        assert {*outcomes} == {*jobs}
        for name, job in jobs.items():
            got, expected = outcomes[name], lone(*job)
            assert got.finish is expected.finish, name
            assert got.token_ids == expected.token_ids, name
            assert got.logprobs == expected.logprobs, name
            assert got.prompt_logprobs == expected.prompt_logprobs, name

    check()
    assert min(seen[each] for each in ("gone on", "ended", "slot")) >= 1, seen
