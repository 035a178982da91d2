"""The step loop on a mock model whose text breaks if a page is ever wrong."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest

from engine.engine import Engine, EngineOptions
from engine.errors import EngineError
from engine.request import FinishReason
from tests.engine.harness import ROOT, Collector, request, run_all
from tests.engine.mock_executor import MockExecutor, expected_text


@pytest.fixture
def collector():
    return Collector()


@pytest.fixture
def engines(collector):
    """Builds engines with small defaults and closes them all."""
    opened: list[Engine] = []

    def build(
        blocks: int = 64,
        *,
        block_tokens: int = 16,
        eos: frozenset[int] = frozenset(),
        **options: int,
    ) -> Engine:
        settings = {"max_context": 256, "max_running": 4, "step_tokens": 64, **options}
        executor = MockExecutor(blocks, block_tokens)
        engine = Engine(executor, eos, EngineOptions(**settings), collector)
        engine.executor = executor  # for the tests only
        engine.start()
        opened.append(engine)
        return engine

    yield build
    for engine in opened:
        engine.close()


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(90) for _ in range(length)]


def test_one_request_generates_what_the_model_says(engines, collector):
    run_all(engines(), collector, [request("a", prompt(1, 40), 10)])
    outcome = collector.outcomes["a"]
    assert outcome.token_ids == expected_text(prompt(1, 40), 10)
    assert outcome.finish is FinishReason.LENGTH


@pytest.mark.parametrize("step_tokens", [4, 7, 16, 64])
def test_chunking_does_not_change_the_text(engines, collector, step_tokens):
    run_all(engines(step_tokens=step_tokens), collector, [request("a", prompt(2, 100), 12)])
    assert collector.outcomes["a"].token_ids == expected_text(prompt(2, 100), 12)


@pytest.mark.parametrize("block_tokens", [32, 64])
def test_larger_blocks_reach_the_end_of_the_context(engines, collector, block_tokens):
    engine = engines(16, block_tokens=block_tokens, step_tokens=16)
    start = prompt(5, 200)
    run_all(engine, collector, [request("cold", start, 56)])
    run_all(engine, collector, [request("warm", start, 56)])
    for name in ("cold", "warm"):
        assert collector.outcomes[name].token_ids == expected_text(start, 56)
    # the last block of 64 is never full: the last token's KV is not computed
    assert collector.outcomes["warm"].cached_tokens == {32: 199, 64: 192}[block_tokens]


def test_many_at_once_do_not_mix(engines, collector):
    requests = [request(f"r{i}", prompt(i, 5 + 9 * i), 5 + i) for i in range(12)]
    run_all(engines(), collector, requests)
    for i in range(12):
        assert collector.outcomes[f"r{i}"].token_ids == expected_text(prompt(i, 5 + 9 * i), 5 + i)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_a_repeat_computes_the_last_token_alone(engines, collector, length):
    engine = engines()
    run_all(engine, collector, [request("cold", prompt(3, length), 20)])
    run_all(engine, collector, [request("warm", prompt(3, length), 20)])
    cold, warm = collector.outcomes["cold"], collector.outcomes["warm"]
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == length - 1  # the tail's block was filled by the answer
    assert warm.token_ids == cold.token_ids


def test_generated_tokens_are_cached_for_the_next_turn(engines, collector):
    engine = engines()
    run_all(engine, collector, [request("a", prompt(4, 20), 30)])
    grown = prompt(4, 20) + collector.outcomes["a"].token_ids + [1, 2, 3]
    run_all(engine, collector, [request("b", grown, 5)])
    assert collector.outcomes["b"].cached_tokens == 48
    assert collector.outcomes["b"].token_ids == expected_text(grown, 5)


def test_roots_do_not_share(engines, collector):
    engine = engines()
    run_all(engine, collector, [request("a", prompt(5, 40), 4)])
    run_all(engine, collector, [request("b", prompt(5, 40), 4, root=b"s" * 16)])
    run_all(engine, collector, [request("c", prompt(5, 40), 4, root=None)])
    run_all(engine, collector, [request("d", prompt(5, 40), 4)])
    cached = [collector.outcomes[name].cached_tokens for name in "abcd"]
    assert cached == [0, 0, 0, 32]


def test_a_shared_prefix_is_computed_once_in_one_burst(engines, collector):
    engine = engines(step_tokens=512, max_running=8)
    shared = prompt(6, 160)
    requests = [request(f"r{i}", [*shared, i, i + 1], 4) for i in range(8)]
    gate = threading.Event()
    engine_call = threading.Thread(target=engine.call, args=(gate.wait,))
    engine_call.start()  # hold the loop so that all eight arrive together
    for each in requests:
        engine.submit(each)
    gate.set()
    engine_call.join()
    collector.wait([each.request_id for each in requests])
    assert sorted(collector.outcomes[f"r{i}"].cached_tokens for i in range(8)) == [0] + [160] * 7
    assert sum(tokens for tokens, _ in engine.executor.steps) == 162 + 7 * 2 + 8 * 3


def test_preempted_sequences_resume_with_the_same_text(engines, collector):
    engine = engines(blocks=16, max_running=6, max_context=256)
    requests = [request(f"r{i}", prompt(i, 30), 60) for i in range(6)]
    run_all(engine, collector, requests)
    assert engine.stats().preemptions > 0
    for i in range(6):
        assert collector.outcomes[f"r{i}"].token_ids == expected_text(prompt(i, 30), 60)
        assert collector.outcomes[f"r{i}"].cached_tokens == 0  # a resumption is no hit
    engine.check_integrity()


def test_the_least_urgent_is_preempted(engines, collector):
    engine = engines(blocks=16, max_running=2)
    engine.submit(request("urgent", prompt(1, 60), 100, priority=0))
    engine.submit(request("patient", prompt(2, 60), 100, priority=5))
    collector.wait(["urgent", "patient"])
    assert engine.stats().preemptions > 0
    finished = [
        output.request_id
        for report in collector.reports
        for output in report.outputs
        if output.finish_reason
    ]
    assert finished == ["urgent", "patient"]


def test_a_waiting_request_takes_the_place_of_a_finished_one_in_the_next_step(engines, collector):
    engine = engines(max_running=1)
    run_all(engine, collector, [request("a", prompt(1, 4), 3), request("b", prompt(2, 4), 3)])
    assert [sequences for _, sequences in engine.executor.steps] == [1] * 6


def test_abort_frees_everything_and_ends_the_request(engines, collector):
    engine = engines()
    engine.submit(request("a", prompt(1, 20), 200))
    collector.wait_tokens("a", 3)
    engine.abort("a")
    collector.wait(["a"])
    assert collector.outcomes["a"].finish is FinishReason.ABORT
    engine.check_integrity()
    assert engine.stats().running == 0


def test_abort_before_the_first_step_and_of_unknown_ids(engines, collector):
    engine = engines(max_running=1)
    engine.submit(request("long", prompt(1, 20), 200))
    engine.submit(request("queued", prompt(2, 20), 200))
    engine.abort("queued")
    engine.abort("never seen")
    collector.wait(["queued"])
    assert collector.outcomes["queued"].token_ids == []
    engine.abort("long")
    collector.wait(["long"])
    engine.check_integrity()


def test_an_exception_fails_only_its_own_request(engines, collector):
    engine = engines(step_tokens=256)
    good = prompt(1, 20)
    engine.executor.poison = next(t for t in range(97) if t not in good + expected_text(good, 5))
    run_all(
        engine,
        collector,
        [request("good", good, 5), request("bad", [5, engine.executor.poison], 5)],
    )
    bad = collector.outcomes["bad"]
    assert (bad.finish, bad.error) == (FinishReason.ERROR, "RuntimeError")
    assert collector.outcomes["good"].token_ids == expected_text(good, 5)
    engine.check_integrity()


def test_nan_logits_fail_only_their_own_request(engines, collector):
    engine = engines(step_tokens=256)
    engine.executor.nan_token = 96
    run_all(engine, collector, [request("good", [1, 2, 3], 3), request("bad", [5, 96], 3)])
    assert collector.outcomes["bad"].finish is FinishReason.ERROR
    assert collector.outcomes["good"].token_ids == expected_text([1, 2, 3], 3)


def test_kv_that_led_to_bad_logits_is_not_kept_for_others(engines, collector):
    engine = engines()
    start = [*prompt(1, 31), 95]
    engine.executor.nan_token = 95
    run_all(engine, collector, [request("bad", start)])
    engine.executor.nan_token = None
    run_all(engine, collector, [request("good", [*start, 1])])
    assert collector.outcomes["bad"].finish is FinishReason.ERROR
    assert collector.outcomes["good"].cached_tokens == 0


def test_an_exception_in_sampling_fails_only_its_own_request(engines, collector, monkeypatch):
    engine = engines()
    sampler = engine._computation.sampler
    sample = sampler.sample

    def fail_for_one_seed(logits, rows):
        outcomes = sample(logits.clone(), rows)
        if any(row.params.seed == 13 and row.position > 24 for row in rows):
            raise RuntimeError("sampling failed")
        return outcomes

    monkeypatch.setattr(sampler, "sample", fail_for_one_seed)
    good = [request(f"r{i}", prompt(i, 20), 12, prompt_logprobs=0) for i in range(3)]
    run_all(engine, collector, [*good, request("bad", prompt(9, 20), 12, seed=13)])
    assert collector.outcomes["bad"].error == "RuntimeError"
    assert len(collector.outcomes["bad"].token_ids) == 5
    for i in range(3):
        assert collector.outcomes[f"r{i}"].token_ids == expected_text(prompt(i, 20), 12)
        assert len(collector.outcomes[f"r{i}"].prompt_logprobs) == 19
    engine.check_integrity()


def test_a_request_that_cannot_be_taken_in_fails_alone(engines, collector):
    engine = engines()
    run_all(engine, collector, [request("bad", [1 << 40]), request("good", prompt(1, 9), 3)])
    assert collector.outcomes["bad"].error == "OverflowError"
    assert collector.outcomes["good"].token_ids == expected_text(prompt(1, 9), 3)


def test_when_the_loop_dies_everybody_hears_of_it(engines, collector, monkeypatch):
    engine = engines()

    def broken(*_):
        raise RuntimeError("the books are wrong")

    monkeypatch.setattr(engine._scheduler, "schedule", broken)
    monkeypatch.setattr(engine._scheduler, "remove", broken)
    run_all(engine, collector, [request("a", prompt(1, 9))])
    assert collector.outcomes["a"].error == "the engine died"
    assert not engine.stats().alive


def test_at_rest_the_books_are_checked(engines, collector, monkeypatch, caplog):
    monkeypatch.setattr("engine.engine._REST_S", 0.01)
    engine = engines()
    run_all(engine, collector, [request("a", prompt(1, 9))])
    time.sleep(0.05)
    assert not caplog.records
    engine._scheduler.pool._free.pop()
    run_all(engine, collector, [request("b", prompt(2, 9))])
    deadline = time.monotonic() + 5
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "books are wrong" in caplog.text
    assert engine.stats().alive


def test_end_of_sequence_and_stop_tokens(engines, collector):
    start = prompt(7, 10)
    text = expected_text(start, 10)
    eos = text[4]
    first = text.index(eos)
    engine = engines(eos=frozenset({eos}))
    run_all(engine, collector, [request("eos", start, 10, ignore_eos=False)])
    run_all(engine, collector, [request("ignored", start, 10)])
    stop_ids = frozenset({text[2]})
    run_all(engine, collector, [request("stop", start, 10, stop_token_ids=stop_ids)])
    assert collector.outcomes["eos"].token_ids == text[: first + 1]
    assert collector.outcomes["eos"].finish is FinishReason.STOP
    assert collector.outcomes["ignored"].token_ids == text
    assert collector.outcomes["stop"].token_ids == text[: text.index(text[2]) + 1]


def test_prompt_logprobs_cover_the_prompt_and_bypass_the_cache(engines, collector):
    engine = engines(step_tokens=16)
    start = prompt(8, 40)
    run_all(engine, collector, [request("a", start, 2)])
    run_all(engine, collector, [request("b", start, 2, prompt_logprobs=1)])
    outcome = collector.outcomes["b"]
    assert outcome.cached_tokens == 0
    assert [entry.token_id for entry in outcome.prompt_logprobs] == start[1:]
    best = [entry.top[0][0] for entry in outcome.prompt_logprobs]
    assert best == [expected_text(start[: i + 1], 1)[0] for i in range(39)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("x", [], 4), "empty"),
        (request("x", [1], 0), "max_tokens"),
        (request("x", [1] * 250, 10), "260 of 256"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(engines, collector, bad, message):
    run_all(engines(), collector, [bad])
    assert collector.outcomes["x"].finish is FinishReason.ERROR
    assert message in collector.outcomes["x"].error


def test_a_pool_smaller_than_the_context_is_refused(collector):
    with pytest.raises(EngineError, match="max_context"):
        Engine(MockExecutor(2), frozenset(), EngineOptions(max_context=256), collector)


def test_close_ends_what_runs_and_refuses_what_comes(engines, collector):
    engine = engines()
    engine.submit(request("a", prompt(1, 20), 200))
    engine.close()
    collector.wait(["a"])
    assert collector.outcomes["a"].finish is FinishReason.ABORT
    assert engine.executor.closed
    with pytest.raises(EngineError, match="stopped"):
        engine.submit(request("b", [1], 1))


def test_random_load_with_aborts_and_preemption_keeps_every_text(engines, collector):
    rng = random.Random(0)
    engine = engines(blocks=24, max_running=6, step_tokens=48)
    roots = [ROOT, b"s" * 16]
    shared = prompt(99, 64)
    jobs = {}
    for i in range(60):
        start = shared[: rng.randrange(0, 64)] + prompt(i, rng.randrange(1, 40))
        jobs[f"r{i}"] = (start, rng.randrange(1, 60))
        engine.submit(request(f"r{i}", *jobs[f"r{i}"], root=rng.choice(roots)))
        if rng.random() < 0.3:
            engine.abort(f"r{rng.randrange(i + 1)}")
        time.sleep(rng.random() * 0.004)
    collector.wait(jobs)
    engine.check_integrity()
    aborted = 0
    for name, (start, tokens) in jobs.items():
        outcome = collector.outcomes[name]
        expected = expected_text(start, tokens)
        if outcome.finish is FinishReason.ABORT:
            aborted += 1
            assert outcome.token_ids == expected[: len(outcome.token_ids)]
        else:
            assert outcome.token_ids == expected, name
    assert 0 < aborted < 60
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_held) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_no_order_changes_a_text(engines, collector, seed):
    """Flows, classes, deadlines and targets decide who goes first, in chunks of any size, with
    preemptions; what comes out is what a lone cold run says."""
    rng = random.Random(seed)
    engine = engines(blocks=20, max_running=5, step_tokens=40)
    shared = prompt(98, 80)
    jobs = {}
    for i in range(50):
        start = shared[: rng.randrange(0, 80)] + prompt(i, rng.randrange(1, 60))
        jobs[f"r{i}"] = (start, rng.randrange(1, 40))
        terms = replace(
            request(f"r{i}", *jobs[f"r{i}"], priority=rng.choice([0, 1, 2])),
            flow=rng.choice([b"", b"a", b"b"]),
            weight=rng.choice([0.5, 1.0, 4.0]),
            deadline_s=rng.choice([None, time.monotonic() + rng.random()]),
            tpot_s=rng.choice([None, 1e-6, 1e-3, 0.1]),
        )
        engine.submit(terms)
        if rng.random() < 0.2:
            engine.abort(f"r{rng.randrange(i + 1)}")
        time.sleep(rng.random() * 0.002)
    collector.wait(jobs)
    engine.check_integrity()
    for name, (start, tokens) in jobs.items():
        outcome = collector.outcomes[name]
        expected = expected_text(start, tokens)
        if outcome.finish is FinishReason.ABORT:
            expected = expected[: len(outcome.token_ids)]
        assert outcome.token_ids == expected, name
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(engines, collector, weight):
    run_all(engines(), collector, [replace(request("x", [1, 2], 4), weight=weight)])
    assert "weight" in collector.outcomes["x"].error
