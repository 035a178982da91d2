"""What an engine tells of its blocks, its costs and its load."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from cache import journal
from cache.block import Tier
from engine.engine import Engine, EngineOptions
from engine.report import StepReport
from tests.cache.event_mirror import Mirror
from tests.cache.redis_blocks import running_store
from tests.cache.valkey import running_valkey
from tests.engine.harness import Collector, request, run_all
from tests.engine.mock_executor import MockExecutor
from tests.engine.tiered_engines import (
    Stage,
    ask,
    owner_of,
    running_stage,
    tokens,
    use_constant_cost,
)


class Listener(Collector):
    """Follows an engine's blocks, and lets a test wait for what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.mirror = Mirror()
        self.heard = threading.Condition()

    def __call__(self, report: StepReport) -> None:
        with self.heard:
            if report.events is not None:
                self.mirror.apply(report.events)
            super().__call__(report)
            self.heard.notify_all()

    def wait_held(self, tier: Tier, blocks: int) -> None:
        """Until it has heard that a tier holds so many blocks."""
        with self.heard:
            there = self.heard.wait_for(lambda: len(self.mirror.held[tier]) == blocks, 20)
        assert there, f"{tier}: {len(self.mirror.held[tier])}, not {blocks}"


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
def engine(listener):
    options = EngineOptions(max_context=256, max_running=1, step_tokens=64)
    with_mock = Engine(MockExecutor(64), frozenset(), options, listener)
    with_mock.start()
    yield with_mock
    with_mock.close()


def device_links(engine: Engine) -> set[bytes]:
    return engine.call(lambda: set(engine._scheduler.pool.links()))


def test_the_first_report_says_what_is_there_and_what_work_takes(engine, listener):
    engine.call(lambda: None)  # it has started
    first = listener.reports[0]
    assert first.events is not None
    assert (first.events.seq, first.events.changes, first.events.snapshot) == (1, (), True)
    assert first.events.epoch > 0
    assert first.cost is not None
    assert (first.cost.step_tokens, first.cost.block_tokens) == (64, 16)
    assert first.cost.token_s > 0
    assert first.outputs == ()
    assert len(listener.reports) == 1


def test_a_later_engine_has_a_larger_epoch(engine, listener):
    engine.call(lambda: None)
    later = Listener()
    other = Engine(MockExecutor(64), frozenset(), EngineOptions(max_context=256), later)
    other.start()
    other.close()
    assert later.mirror.epoch > listener.mirror.epoch


def test_each_step_tells_what_it_filled(engine, listener):
    run_all(engine, listener, [request("a", list(range(70)), 20)])
    told = [
        (report.tokens, len(report.events.changes[0].stored))
        for report in listener.reports
        if report.events is not None and report.tokens
    ]
    assert told == [(64, 4), (1, 1)]  # the blocks of the prompt, then one that the answer filled
    listener.mirror.check(Tier.DEVICE, device_links(engine))
    run_all(engine, listener, [request("again", list(range(70)), 2)])
    assert listener.mirror.batches == 3, "what is there already is no news"


def test_what_is_pushed_out_is_told(engine, listener):
    for seed in range(12):
        run_all(engine, listener, [request(f"{seed}", [seed] * 200, 2)])
        listener.mirror.check(Tier.DEVICE, device_links(engine))
    assert len(listener.mirror.held[Tier.DEVICE]) < 12 * 12


def test_an_erasure_at_rest_is_told_without_waiting_for_a_request(engine, listener, monkeypatch):
    monkeypatch.setattr(journal, "LINKS_AT_ONCE", 5)
    run_all(engine, listener, [request("a", list(range(90)) * 2, 2)])
    listener.wait_held(Tier.DEVICE, 11)
    before = listener.mirror.batches
    engine.erase_cache(None, None)
    listener.wait_held(Tier.DEVICE, 0)
    assert listener.mirror.batches == before + 3, "eleven links, five at a time"


def test_a_snapshot_stands_in_line_with_the_other_batches(engine, listener):
    run_all(engine, listener, [request("a", list(range(90)), 2)])
    snapshot = engine.block_snapshot()
    assert snapshot.snapshot
    assert set(snapshot.changes[0].stored) == device_links(engine)
    assert [report.events for report in listener.reports].count(snapshot) == 1
    run_all(engine, listener, [request("b", list(range(90, 180)), 2)])
    assert listener.mirror.seq > snapshot.seq
    listener.mirror.check(Tier.DEVICE, device_links(engine))


def test_what_work_takes_is_told_again_after_a_while(engine, listener, monkeypatch):
    run_all(engine, listener, [request("a", list(range(90)), 9)])
    assert sum(report.cost is not None for report in listener.reports) == 1
    monkeypatch.setattr("engine.engine._COST_S", 0.0)
    run_all(engine, listener, [request("b", list(range(90)), 9)])
    assert listener.reports[-1].cost is not None


def test_the_load_is_what_has_to_be_computed(engine, listener):
    gate = threading.Event()
    holding = threading.Thread(target=engine.call, args=(gate.wait,))
    holding.start()  # so that both are here when the first step begins
    engine.submit(request("a", list(range(90)), 3))
    given = replace(request("b", [7] * 60, 12), generated_token_ids=(1,) * 10)
    engine.submit(given)
    assert engine.stats().pending_tokens == 90 + 70
    gate.set()
    holding.join()
    listener.wait("ab")
    steps = [report.stats for report in listener.reports if report.tokens]
    assert [stats.pending_tokens for stats in steps] == [26 + 70, 70, 70, 70, 6, 0, 0]
    assert [stats.context_tokens for stats in steps] == [64, 90, 91, 0, 64, 70, 0]
    assert engine.stats().pending_tokens == 0


@pytest.fixture
def store(tmp_path):
    with running_valkey(tmp_path) as server, running_store(server.url) as store:
        yield store


def hear(stage: Stage, mirror: Mirror) -> None:
    """Have the mirror follow what the stage's engine has told by now."""
    for _ in range(2):  # what was done before a call has been told of by the next one
        stage.engine.call(lambda: None)
    for report in list(stage.out.reports):
        if report.events is not None and report.events.seq > mirror.seq:
            mirror.apply(report.events)


def test_every_tier_is_told_of(store, monkeypatch):
    use_constant_cost(monkeypatch)
    mirror = Mirror()
    with running_stage("torch", store, blocks=48, write_through=True) as stage:
        prompt = tokens("told", 80)
        stage.run_one(ask("a", prompt))
        stage.wait_quiet()
        stage.run_one(ask("b", prompt))  # asked for twice: worth writing to Redis
        stage.run_one(ask("c", tokens("other", 60), tenant="beta"))
        stage.wait_quiet()
        hear(stage, mirror)
        assert stage.tiers.dram is not None
        mirror.check(Tier.DEVICE, stage.tiers.device.links())
        mirror.check(Tier.DRAM, stage.tiers.dram.pool.links())
        assert len(mirror.held[Tier.REDIS]) == 5
        told = {tier: set(links) for tier, links in mirror.held.items()}
        snapshot = stage.engine.block_snapshot()
        assert {change.tier: set(change.stored) for change in snapshot.changes} == told
        stage.engine.erase_cache(owner_of("acme").tenant, None)
        stage.wait_quiet()
        hear(stage, mirror)
        assert mirror.held[Tier.REDIS] == set()
        mirror.check(Tier.DRAM, stage.tiers.dram.pool.links())
        assert len(mirror.held[Tier.DEVICE]) == 3, "those of the other tenant"
