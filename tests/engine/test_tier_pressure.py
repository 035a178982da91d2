"""Tiers with too little room, and a Redis too slow for those who wait together."""

from __future__ import annotations

import time

import pytest

from cache.block import Retention, Tier
from cache.block_pool import Share
from cache.report import Miss
from tests.cache.redis_blocks import running_store, until
from tests.cache.valkey import running_valkey
from tests.engine.tier_stage import TierStage, owner
from tests.engine.tiered_engines import (
    MAX_CONTEXT,
    ask,
    hold,
    owner_of,
    running_stage,
    tokens,
    use_constant_cost,
)

LONGEST_BLOCKS = MAX_CONTEXT // 32


def prompt(blocks: int) -> list[int]:
    """Every one begins like the longer ones."""
    return [*range(16 * blocks), 1000, 1001]


def only_in_redis(stage: TierStage, blocks: int, *in_dram: int) -> None:
    """The blocks of a prompt, but for those that DRAM has too."""
    keys = stage.run("1", prompt(blocks)).block_keys(16, 16 * blocks)
    stage.run("again", prompt(blocks))
    for index, key in enumerate(keys):
        stage.tiers.device.drop(stage.tiers.device.find(key))
        if index not in in_dram:
            stage.dram.pool.drop(stage.dram.pool.find(key))


def test_one_late_load_is_late_for_all_who_wait_for_it():
    stage = TierStage(pages=24, slots=48)
    only_in_redis(stage, 4)
    stage.redis.late = True
    questions = []
    probe, fetch = stage.redis.probe, stage.redis.fetch
    stage.redis.probe = lambda *asked: (questions.append("probe"), probe(*asked))
    stage.redis.fetch = lambda *asked: (questions.append("fetch"), fetch(*asked))
    for name in "234":
        stage.submit(name, prompt(4))
    stage.finish()
    assert sorted(questions) == ["fetch", *["probe"] * 6]  # the first block, then the rest
    assert stage.done["2"].cached_tokens == 0
    assert stage.done["2"].cache_use.runs[0].miss is Miss.LATE
    # they wait for the first one to compute what did not come
    assert [stage.done[name].cached_tokens for name in "34"] == [64, 64]
    assert stage.tiers.counters[Tier.REDIS].misses["late"] == 12
    stage.check()


def test_slots_held_for_a_prompt_that_searches_twice_are_given_back():
    stage = TierStage(pages=24, slots=48, max_running=4)
    only_in_redis(stage, 6, 2)
    stage.submit("short", prompt(2))
    stage.submit("long", prompt(6))  # holds what DRAM has while it asks for the rest
    stage.finish()
    assert [stage.done[name].cached_tokens for name in ("short", "long")] == [32, 96]
    assert stage.dram.pool.counts().held == 0
    stage.check()


def test_blocks_that_shall_last_are_written_as_there_is_room():
    stage = TierStage(pages=24, slots=16)
    assert stage.cache._demotion.room_for_stores == 4
    wish = (Retention(12 * 16, 3600.0, durable=True),)
    done = stage.run("1", prompt(12), retention=wish)
    assert stage.redis.values.keys() == {key.link for key in done.block_keys(16, 12 * 16)}
    assert not stage.cache._demotion._wishes
    stage.check()


def test_blocks_that_shall_last_are_written_when_redis_is_back(monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stage = TierStage(pages=24, slots=48)
    stage.redis.up = False
    stage.run("1", prompt(3), retention=(Retention(3 * 16, 3600.0, durable=True),))
    stage.redis.up = True
    stage.finish()
    assert not stage.redis.values, "it is not tried at every step"
    now[0] += 1.5
    stage.step()
    stage.finish()
    assert len(stage.redis.values) == 3
    stage.check()


def test_what_was_erased_is_not_written_any_more_because_it_was_to_last(monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stage = TierStage(pages=24, slots=48)
    stage.redis.up = False
    stage.run("1", prompt(3), retention=(Retention(3 * 16, 3600.0, durable=True),))
    stage.cache.erase(None, None)
    stage.redis.up = True
    stage.run("2", prompt(3))  # the same blocks again, with no such wish
    now[0] += 1.5
    stage.step()
    stage.finish()
    assert not stage.redis.values
    stage.check()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("what", ["refused stores", "failed stores", "failed copies"])
def test_blocks_that_shall_last_do_not_come_down_again_and_again(what, keeps):
    """They would hold their pages all the time, and others would wait for those."""
    stage = TierStage(pages=24, slots=48, keeps=keeps)
    if what == "failed copies":
        stage.copier._run = lambda moves, done, *, down: done(None)
    elif what == "failed stores":
        stage.redis.store = lambda blocks, done, _: (
            stage.redis.queue.append(lambda: done((False,) * len(blocks))) or True
        )
    else:
        stage.redis.store = lambda *_: False
    stage.run("1", prompt(20), retention=(Retention(20 * 16, 3600.0, durable=True),))
    assert len(stage.cache._demotion._wishes) == 20, "they are tried again later"
    assert stage.tiers.device.counts().held == 0
    stage.check()


def test_a_tenant_whose_blocks_redis_does_not_take_keeps_nobody_elses_from_it(monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stage = TierStage(pages=24, slots=16)
    assert stage.cache._demotion.room_for_stores == 4
    store = stage.redis.store

    def store_others(blocks, done, ttl_s=None):
        others = [block for block in blocks if block[0].owner != owner("full")]
        fates = tuple(key.owner != owner("full") for key, _ in blocks)
        return bool(others) and store(others, lambda _: done(fates), ttl_s)

    stage.redis.store = store_others
    stage.run("1", prompt(8), tenant="full", retention=(Retention(8 * 16, 3600.0, durable=True),))
    wish = (Retention(2 * 16, 3600.0, durable=True),)
    done = stage.run("2", prompt(2), tenant="other", retention=wish)
    for _ in range(4):
        now[0] += 1.5
        stage.step()
        stage.finish()
    assert stage.redis.values.keys() == {key.link for key in done.block_keys(16, 2 * 16)}
    stage.check()


def test_nothing_more_is_copied_down_once_the_cache_is_closed():
    stage = TierStage(pages=24, slots=16)
    stage.submit("1", prompt(12), retention=(Retention(12 * 16, 3600.0, durable=True),))
    while not stage.redis.sent:
        stage.redis.step()
        stage.step()
        stage.copier.step()
    while stage.redis.queue:
        stage.redis.step()  # then there is room for the next ones
    stage.cache.close()
    assert not stage.copier.queue
    assert stage.tiers.device.counts().held == 0


def test_what_is_asked_for_again_while_it_comes_down_goes_on_to_redis():
    stage = TierStage(pages=24, slots=48)
    keys = stage.run("1", prompt(4)).block_keys(16, 64)
    demotion = stage.cache._demotion
    pages = [stage.tiers.device.find(key) for key in keys]
    demotion.copy_down(pages)  # as it is done ahead of eviction
    assert stage.cache.copies_down
    demotion.store_pages(pages[:3])
    demotion.copy_down(pages)  # once more, for no more than DRAM: that takes nothing back
    stage.finish()
    assert stage.redis.values.keys() == {key.link for key in keys[:3]}
    assert all(stage.dram.pool.find(key) is not None for key in keys)
    stage.check()


def test_a_block_that_landed_is_there_for_all_who_waited():
    stage = TierStage(pages=24, slots=48, keeps=False)
    keys = stage.run("1", prompt(4)).block_keys(16, 64)
    stage.run("again", prompt(4))
    for key in keys:
        stage.tiers.device.drop(stage.tiers.device.find(key))
    before = stage.tiers.counters[Tier.REDIS].loads
    stage.submit("2", prompt(4))
    stage.submit("3", [*prompt(4)[:64], 7])
    stage.finish()
    assert stage.tiers.counters[Tier.REDIS].loads - before == 4
    assert stage.tiers.counters[Tier.DRAM].hits == 0
    assert [stage.done[name].cached_tokens for name in "23"] == [64, 64]
    assert stage.dram.pool.counts().free == 48
    stage.check()


@pytest.fixture
def store(tmp_path):
    with running_valkey(tmp_path) as server, running_store(server.url) as store:
        yield store


@pytest.fixture
def _loads_win(monkeypatch):
    use_constant_cost(monkeypatch)


@pytest.mark.usefixtures("_loads_win")
class TestEngine:
    def test_computing_a_cached_prompt_again_does_not_need_room_for_it_twice(self):
        """The cached blocks would be pinned below those that follow them, unused; and a small quota
        forgets whatever an attempt that is preempted leaves for the next one."""
        whole = tokens("whole", 226)
        with running_stage("torch", blocks=LONGEST_BLOCKS, block_tokens=32) as stage:
            stage.engine.set_shares({owner_of("acme").tenant: Share(0, 3)}, {}, {})
            stage.run_one(ask("begin", whole[:100]))
            stage.run_one(ask("again", whole, 30, prompt_logprobs=0))
            assert stage.engine.stats().preemptions == 0
            stage.check()

    def test_pages_that_a_copy_holds_are_waited_for(self):
        with running_stage(
            "torch", blocks=LONGEST_BLOCKS, block_tokens=32, write_through=True
        ) as stage:
            held = hold(stage, "download")
            stage.run_one(ask("first", tokens("first", 128)))
            until(lambda: held.waiting > 0)
            stage.submit(ask("long", tokens("long", 64), 200))
            stage.out.wait_tokens("long", 90)
            time.sleep(0.2)
            assert stage.out.outcomes["long"].finish is None
            assert stage.engine.stats().running == 1
            cpu_s = stage.engine.call(time.thread_time)
            time.sleep(0.3)
            assert stage.engine.call(time.thread_time) - cpu_s < 0.1
            held.release()
            stage.out.wait(["long"])
            assert stage.engine.stats().preemptions == 0
            stage.check()

    def test_a_tenant_without_room_in_dram_is_not_copied_there(self):
        with running_stage("torch", blocks=18, write_through=True) as stage:
            stage.engine.set_shares({}, {owner_of("acme").tenant: Share(0, 0)}, {})
            for index in range(4):
                stage.run_one(ask(f"{index}", tokens(index, 100)))
            stage.check()
            dram = stage.tier(Tier.DRAM)
            assert (dram.stores, dram.cached) == (0, 0)
            assert dram.dropped["quota"] > 0

    def test_floors_are_cut_where_the_pages_are_just_enough(self):
        with running_stage("torch", blocks=LONGEST_BLOCKS, block_tokens=32) as stage:
            for floor in (0, 4):
                stage.engine.set_shares({owner_of("beta").tenant: Share(floor)}, {}, {})
                stage.run_one(ask(f"b {floor}", tokens("b", 200), tenant="beta"))
                stage.run_one(ask(f"a {floor}", tokens("a", 280), 8))
            stage.check()

    @pytest.mark.parametrize("dram_blocks", [0, 1, 8])
    def test_stopping_saves_everything_however_small_dram_is(self, dram_blocks, store):
        prompts = [tokens(index, 16 * 5 + 1) for index in range(8)]
        with running_stage("torch", store, dram_blocks=dram_blocks) as stage:
            for index, each in enumerate(prompts):
                stage.run_one(ask(f"{index}", each))
        with running_stage("torch", store, dram_blocks=64) as stage:
            for index, each in enumerate(prompts):
                assert stage.run_one(ask(f"{index}", each)).redis_tokens == 80
