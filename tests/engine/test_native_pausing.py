"""A step that pauses between two ops, and goes on later as if nothing had been."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decoder import build_program
from engine.executors.base import PausableExecutor
from engine.executors.native import NativeExecutor, NativeUnavailable
from engine.executors.native_build import find_compiler
from engine.executors.native_lowering import lower
from tests.engine.native_models import (
    ARCHITECTURES,
    Sequence,
    architecture,
    make_step,
    open_native,
    random_ids,
    run_alone,
)

try:
    find_compiler()
except NativeUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

ARCHITECTURE = ARCHITECTURES["gemma_like"]
OPS = len(lower(build_program(ARCHITECTURE)))
PAGES = [7, 3, 11, 2, 30, 14, 9, 21, 5, 17]
OTHER_PAGES = [40, 1, 28, 33, 4, 19, 25, 37]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16])
def executor(request):
    executor = open_native(ARCHITECTURE, request.param, threads=2)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def whole(executor):
    """Logits of every position of what is paused and of what runs meanwhile, undisturbed."""
    paused = run_alone(executor, random_ids(150, 1), [150], PAGES)
    beside = run_alone(executor, random_ids(120, 2), [120], OTHER_PAGES)
    return paused, beside


def go_on(executor: NativeExecutor, logits: torch.Tensor | None) -> torch.Tensor:
    executor.unpause()
    while logits is None:
        logits = executor.resume()
    return logits


def test_the_native_executor_can_be_paused(executor):
    assert isinstance(executor, PausableExecutor)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_pauses_change_no_bit(executor, whole, data):
    """A prefill in chunks, paused again and again at any op, beside steps of another sequence."""
    paused, beside = (
        Sequence(random_ids(150, 1), PAGES),
        Sequence(random_ids(120, 2), OTHER_PAGES),
    )
    executor.pages.zero_()
    while paused.computed < 150:
        first = paused.computed
        chunk = data.draw(st.integers(1, min(90, 150 - first)), label="chunk")
        batch = make_step([(paused, chunk)])
        ops = sorted(data.draw(st.sets(st.integers(0, OPS - 2), max_size=4), label="ops"))
        executor.unpause()
        for pauses, op in enumerate(ops):
            executor.pause(op)
            logits = executor.resume() if pauses else executor.start(batch)
            assert logits is None
            if beside.computed < 120:
                at = beside.computed
                tokens = data.draw(st.integers(1, min(70, 120 - at)), label="beside")
                rows = executor.forward(make_step([(beside, tokens)]))
                assert torch.equal(rows, whole[1][at : at + tokens])
        executor.unpause()
        logits = executor.resume() if ops else executor.start(batch)
        assert logits is not None
        assert torch.equal(logits, whole[0][first : paused.computed])


def test_a_pause_can_be_asked_for_from_another_thread(executor, whole):
    """Until the step has paused at least once at a place that only the clock chose."""
    paused_once = False
    for _ in range(200):
        batch = make_step([(Sequence(random_ids(150, 1), PAGES), 150)])
        executor.unpause()
        started = threading.Event()

        def interrupt(started: threading.Event = started) -> None:
            started.wait()
            executor.pause()

        thread = threading.Thread(target=interrupt)
        thread.start()
        started.set()
        logits = executor.start(batch)
        thread.join()
        paused_once = logits is None
        assert torch.equal(go_on(executor, logits), whole[0])
        if paused_once:
            break
    assert paused_once


def test_the_last_op_is_not_paused_after(executor):
    executor.pause(OPS - 1)
    assert executor.start(make_step([(Sequence(random_ids(20, 3), [0, 1]), 20)])) is not None
    executor.unpause()


def test_forward_does_not_pause(executor):
    executor.pause()
    assert executor.forward(make_step([(Sequence(random_ids(20, 3), [0, 1]), 20)])) is not None
    executor.unpause()


def test_a_larger_step_beside_leaves_the_paused_one_alone(executor, whole):
    """Room for activations is made for each of the two apart."""
    executor.pause(OPS // 2)
    assert executor.start(make_step([(Sequence(random_ids(150, 1), PAGES), 150)])) is None
    everybody = [(Sequence(random_ids(100, 8 + n), range(40, 47)), 100) for n in range(3)]
    assert executor.forward(make_step(everybody, every_row=False)).shape[0] == 3
    assert torch.equal(go_on(executor, None), whole[0])


def test_a_wrong_step_beside_leaves_the_paused_one_alone(executor, whole):
    executor.pause(OPS // 3)
    assert executor.start(make_step([(Sequence(random_ids(150, 1), PAGES), 150)])) is None
    wrong = make_step([(Sequence(random_ids(3, 8), [1]), 3)])
    wrong.token_ids[1] = -1
    with pytest.raises(ValueError, match="token id -1"):
        executor.forward(wrong)
    assert torch.equal(go_on(executor, None), whole[0])


def test_a_step_that_lies_aside_can_be_given_up(executor, whole):
    executor.pause()
    assert executor.start(make_step([(Sequence(random_ids(90, 5), OTHER_PAGES), 90)])) is None
    executor.unpause()
    logits = executor.start(make_step([(Sequence(random_ids(150, 1), PAGES), 150)]))
    assert logits is not None
    assert torch.equal(logits, whole[0])
    with pytest.raises(RuntimeError, match="no step lies aside"):
        executor.resume()


def test_it_can_be_closed_with_a_step_aside():
    executor = open_native(architecture())
    executor.pause()
    assert executor.start(make_step([(Sequence(random_ids(40, 5), [0, 1, 2]), 40)])) is None
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.resume()


def test_time_aside_is_nobodys_in_the_profile(executor, whole):
    executor.profile()
    executor.pause(OPS // 2)
    assert executor.start(make_step([(Sequence(random_ids(150, 1), PAGES), 150)])) is None
    half = executor.profile()
    assert torch.equal(go_on(executor, None), whole[0])
    rest = executor.profile()
    assert half["angles"] > 0
    assert rest["angles"] == 0
    assert rest["linear"] > 0
