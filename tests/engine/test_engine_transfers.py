"""The step loop while transfers between tiers are under way: it neither waits nor spins, and it can
be closed, erased and killed at any moment."""

from __future__ import annotations

import threading
import time

import pytest

from cache.envelope import owner_pattern
from engine.errors import EngineError
from engine.request import FinishReason
from tests.cache.redis_blocks import running_store, until
from tests.cache.valkey import running_valkey
from tests.engine.tier_traffic import ColdRuns, Traffic
from tests.engine.tiered_engines import (
    ask,
    hold,
    owner_of,
    running_stage,
    tokens,
    use_constant_cost,
)

LOADS = ["probe", "fetch", "upload"]
WRITES = ["download", "store"]
PROMPT = tokens("loaded", 5 * 16 + 3)

pytestmark = pytest.mark.usefixtures("loads_win")


@pytest.fixture
def valkey(tmp_path):
    with running_valkey(tmp_path) as server:
        yield server


@pytest.fixture
def store(valkey):
    with running_store(valkey.url) as store:
        yield store


@pytest.fixture(scope="module")
def cold():
    runs = ColdRuns()
    yield runs
    runs.close()


@pytest.fixture
def loads_win(monkeypatch):
    use_constant_cost(monkeypatch)


def put_in_redis(stage):
    """PROMPT is in Redis and nowhere else."""
    stage.run_one(ask("first", PROMPT))
    stage.run_one(ask("second", PROMPT))
    stage.wait_quiet()
    stage.drop(0, 0, stage.asked["first"])


def begin(stage, step):
    """A request that gets as far as `step`, which waits, and is done otherwise."""
    if step in LOADS:
        put_in_redis(stage)
        held = hold(stage, step)
        stage.submit(ask("held", PROMPT))
    else:
        held = hold(stage, step)
        stage.run_one(ask("held", PROMPT))
        stage.run_one(ask("again", PROMPT))
    until(lambda: held.waiting > 0)
    return held


@pytest.mark.parametrize("step", LOADS)
def test_a_pending_load_holds_up_nobody_and_costs_no_time(step, store, cold):
    with running_stage("native", store) as stage:
        held = begin(stage, step)
        stage.run_one(ask("other", tokens("other", 15), 200))  # to its end, while the load waits
        assert stage.out.outcomes["held"].finish is None
        steps, cpu_s = stage.engine.stats().steps, stage.engine.call(time.thread_time)
        time.sleep(0.4)
        assert stage.engine.call(time.thread_time) - cpu_s < 0.1
        assert stage.engine.stats().steps == steps
        held.release()
        stage.out.wait(["held"])
        use = stage.out.uses["held"]
        assert use.redis_tokens == 80
        assert use.load_s >= 0.4 or step == "upload"
        stage.check()
        cold.check(stage, "native")


@pytest.mark.parametrize("step", [*LOADS, *WRITES])
def test_an_engine_closes_while_a_transfer_is_under_way(step, store):
    with running_stage("native", store) as stage:
        held = begin(stage, step)
        release = threading.Timer(0.2, held.release)
        release.start()
        began = time.monotonic()
        stage.engine.close()
        assert time.monotonic() - began < 8.0
        release.join()
        finish = FinishReason.ABORT if step in LOADS else FinishReason.LENGTH
        assert stage.out.outcomes["held"].finish is finish
        assert stage.tiers.device.counts().held == 0
        assert stage.tiers.dram.pool.counts().held == 0
        stage.tiers.device.check_integrity()
        with pytest.raises(EngineError):
            stage.engine.submit(ask("late", PROMPT))


def test_an_engine_closes_while_redis_is_frozen(valkey, store):
    with running_stage("native", store, write_through=True) as stage:
        put_in_redis(stage)
        valkey.freeze()
        try:
            stage.submit(ask("a", PROMPT))
            stage.submit(ask("b", tokens("b", 100), 50))
            stage.out.wait(["b"])
            began = time.monotonic()
            stage.engine.close()
            assert time.monotonic() - began < 8.0
            store.close()
        finally:
            valkey.thaw()
        assert stage.tiers.device.counts().held == 0


@pytest.mark.parametrize("step", [*LOADS, *WRITES])
def test_erasure_reaches_what_is_under_way(step, valkey, store, cold):
    acme = owner_of("acme")
    with running_stage("native", store) as stage:
        stage.run_one(ask("other", PROMPT, tenant="beta"))
        stage.run_one(ask("other again", PROMPT, tenant="beta"))
        stage.wait_quiet()
        held = begin(stage, step)
        erasure = threading.Thread(target=stage.engine.erase_cache, args=(acme.tenant, None))
        erasure.start()
        if step == "store":  # Redis cannot be asked to erase before it has answered
            time.sleep(0.1)
        else:
            erasure.join()
        held.release()
        erasure.join()
        stage.out.wait(["held"])
        stage.check()
        share = {each.tenant: each for each in stage.engine.cache_stats().tenants}
        assert acme.tenant not in share or (
            share[acme.tenant].device == share[acme.tenant].dram == 0
        )
        with valkey.client() as client:
            until(lambda: not list(client.scan_iter(owner_pattern(acme.tenant, None))))
            assert list(client.scan_iter(owner_pattern(owner_of("beta").tenant, None)))
        assert stage.run_one(ask("later", PROMPT)).cached_tokens == 0
        assert stage.run_one(ask("beta", PROMPT, tenant="beta")).cached_tokens == 80
        cold.check(stage, "native")


def test_an_erasure_knows_the_requests_that_came_in_before_it(store):
    acme = owner_of("acme")
    with running_stage("native", store) as stage:
        busy, go = threading.Event(), threading.Event()

        def step():
            busy.set()
            go.wait(10)

        long_step = threading.Thread(target=stage.engine.call, args=(step,))
        long_step.start()
        busy.wait(10)
        stage.engine.submit(ask("came before", PROMPT))
        erasure = threading.Thread(target=stage.engine.erase_cache, args=(acme.tenant, None))
        erasure.start()
        until(lambda: stage.engine._calls)
        go.set()
        erasure.join()
        long_step.join()
        stage.out.wait(["came before"])
        assert stage.run_one(ask("later", PROMPT)).cached_tokens == 0
        assert stage.run_one(ask("later still", PROMPT)).cached_tokens == 80


class Mortal:
    """An executor whose steps end the step loop when told to."""

    def __init__(self, real):
        self._real = real
        self.deadly = False
        self.poison = None

    def __getattr__(self, name):
        return getattr(self._real, name)

    def forward(self, batch):
        self._check(batch)
        return self._real.forward(batch)

    def start(self, batch):
        self._check(batch)
        return self._real.start(batch)

    def _check(self, batch):
        if self.deadly:
            raise SystemExit("the executor is gone")
        if self.poison is not None and (batch.token_ids == self.poison).any():
            raise RuntimeError("poisoned")


@pytest.mark.parametrize("step", [None, *LOADS, *WRITES])
def test_a_crash_ends_every_request_and_hurts_nobody_else(step, store, cold):
    with running_stage("native", store, wrap=Mortal) as stage:
        if step is None:
            put_in_redis(stage)
        held = begin(stage, step) if step is not None else None
        stage.submit(ask("running", tokens("running", 15), 240))
        stage.out.wait_tokens("running", 3)
        stage.executor.deadly = True
        stage.out.wait(["running", *(["held"] if step else [])])
        assert stage.out.outcomes["running"].finish is FinishReason.ERROR
        assert not stage.engine.stats().alive
        with pytest.raises(EngineError):
            stage.engine.submit(ask("late", PROMPT))
        with pytest.raises(EngineError):
            stage.engine.check_integrity()
        began = time.monotonic()
        stage.engine.close()
        assert time.monotonic() - began < 5.0
        if held is not None:
            held.release()  # what comes after the end goes nowhere
    with running_stage("native", store) as stage:
        stage.run_one(ask("next", PROMPT))
        stage.check()
        cold.check(stage, "native")


def test_a_request_that_fails_in_its_step_takes_nothing_with_it(store, cold):
    with running_stage("native", store, wrap=Mortal) as stage:
        put_in_redis(stage)
        stage.executor.poison = 82
        clean = [token % 82 for token in PROMPT]
        stage.run([ask("bad", [*PROMPT[:80], 82, 1]), ask("good", [*clean[:70], 1, 2])])
        assert stage.out.outcomes["bad"].finish is FinishReason.ERROR
        assert stage.out.outcomes["bad"].error == "RuntimeError"
        del stage.asked["bad"]
        stage.wait_quiet()
        stage.engine.check_integrity()
        cold.check(stage, "native")


def fail_once(monkeypatch, owner, name):
    real, calls = getattr(owner, name), []

    def broken(*args):
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError
        return real(*args)

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize("at", ["its search has begun", "it is in line"])
def test_a_request_that_cannot_be_taken_in_leaves_nothing_behind(at, store, monkeypatch):
    with running_stage("native", store) as stage:
        put_in_redis(stage)
        if at == "it is in line":
            fail_once(monkeypatch, stage.engine._scheduler, "_foresee")
        else:
            fail_once(monkeypatch, stage.cache, "blocks_held")
        stage.run([ask("bad", PROMPT)])
        assert stage.out.outcomes["bad"].error == "MemoryError"
        stage.run_one(ask("other", tokens("other", 15)))
        stage.wait_quiet()
        assert not stage.cache._promotion.holds_slots
        assert stage.engine.stats().waiting == 0
        stage.engine.check_integrity()


def test_two_models_share_one_redis(store, cold):
    """Different weights, same prompts, same tenants, at the same time; and again after both have
    left what they had in Redis."""
    for attempt in range(2):
        with (
            running_stage("native", store, blocks=24, model=0) as one,
            running_stage("native", store, blocks=24, model=1) as two,
        ):
            stages = [one, two]
            traffic = [Traffic(seed=77 + attempt, block_tokens=16) for _ in stages]
            senders = [
                threading.Thread(target=each.send, args=(stage, 24), kwargs={"threads": 2})
                for each, stage in zip(traffic, stages, strict=True)
            ]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join()
            for model, stage in enumerate(stages):
                stage.check()
                cold.check(stage, "native", model=model)
                stage.run_one(ask("again", PROMPT))
                if attempt:
                    assert stage.out.uses["again"].cached_tokens == 80
            texts = [stage.out.outcomes["again"].token_ids for stage in stages]
            assert texts[0] != texts[1]
