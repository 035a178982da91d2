"""The scheduler over three tiers: what is found where, under every order of events."""

from __future__ import annotations

import time

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.block import Retention, Tier
from cache.report import CacheUse, Miss
from tests.engine.tier_stage import BLOCK_TOKENS, TierStage, owner


def prompt(seed: int, blocks: int, tail: int = 3) -> list[int]:
    """Blocks of one number each, so that prompts of one seed share prefixes."""
    return [seed * 100 + i // BLOCK_TOKENS for i in range(blocks * BLOCK_TOKENS)] + [7] * tail


def push_out(stage: TierStage, blocks: int = 10, rounds: int = 2) -> None:
    """Fill the device with other prompts."""
    for i in range(rounds):
        stage.run(f"filler-{i}-{len(stage.done)}", prompt(50 + i, blocks))


def test_a_repeat_is_found_on_the_device():
    stage = TierStage()
    assert stage.run("1", prompt(1, 4)).cached_tokens == 0
    use = stage.run("2", prompt(1, 4)).cache_use
    assert use.device_tokens == use.cached_tokens == 64
    assert [(run.tier, run.blocks) for run in use.runs] == [(Tier.DEVICE, 4), (None, 1)]
    assert use.runs[-1].miss is Miss.LAST_TOKEN


def test_what_the_device_pushed_out_comes_back_from_dram():
    stage = TierStage()
    stage.run("1", prompt(1, 4))
    push_out(stage)
    use = stage.run("2", prompt(1, 4)).cache_use
    assert (use.dram_tokens, use.cached_tokens) == (64, 64)
    stage.check()


def test_what_dram_pushed_out_comes_back_from_redis():
    stage = TierStage(slots=10)
    stage.run("1", prompt(1, 4))
    stage.run("again", prompt(1, 4))  # seen twice: worth writing
    push_out(stage, rounds=6)
    assert stage.dram.pool.find(stage.done["1"].block_keys(16, 64)[0]) is None
    use = stage.run("2", prompt(1, 4)).cache_use
    assert (use.redis_tokens, use.cached_tokens) == (64, 64)
    assert use.load_s > 0
    stage.check()


def test_a_prompt_can_come_from_all_tiers_at_once():
    stage = TierStage(pages=24, slots=48)
    first = stage.run("1", prompt(1, 9))
    keys = first.block_keys(16, 144)
    stage.run("again", prompt(1, 9))
    stage.finish()
    for key in keys[6:]:
        stage.tiers.device.drop(stage.tiers.device.find(key))
        stage.dram.pool.drop(stage.dram.pool.find(key))
    for key in keys[3:6]:
        stage.tiers.device.drop(stage.tiers.device.find(key))
    use = stage.run("2", prompt(1, 9)).cache_use
    assert (use.device_tokens, use.dram_tokens, use.redis_tokens) == (48, 48, 48)
    assert [run.tier for run in use.runs] == [Tier.DEVICE, Tier.DRAM, Tier.REDIS, None]
    stage.check()


def test_what_comes_from_dram_while_a_step_lies_aside_runs_beside_it():
    stage = TierStage(pages=16, redis=False)
    stage.run("1", prompt(1, 4))
    push_out(stage)
    stage.submit("patient", prompt(9, 7), priority=2)
    counted = []

    def beside(chunks):
        stage.submit("urgent", prompt(1, 4))
        counted.append(stage.step_beside(2, 64))
        assert len(stage.scheduler.loading) == 1
        stage.copier.close()
        counted.append(stage.step_beside(2, 64))

    stage.step(beside)
    assert [[chunk.tokens for chunk in chunks] for chunks in counted] == [[], [3]]
    assert stage.done["urgent"].cache_use.dram_tokens == 64
    stage.finish()
    stage.check()


@pytest.mark.parametrize("tail", [0, 1, 15])
@pytest.mark.parametrize("tier", ["device", "dram", "redis"])
def test_the_last_token_is_always_computed(tier, tail):
    stage = TierStage(pages=24, slots=48)
    tokens = prompt(1, 4, tail)
    keys = stage.run("1", tokens).block_keys(16, 64)
    stage.run("again", tokens)
    if tier != "device":
        for key in keys:
            if (page := stage.tiers.device.find(key)) is not None:
                stage.tiers.device.drop(page)
    if tier == "redis":
        for key in keys:
            if (slot := stage.dram.pool.find(key)) is not None:
                stage.dram.pool.drop(slot)
    use = stage.run("2", tokens).cache_use
    expected = 64 if tail else 63  # of a full last block, all but one token
    assert use.cached_tokens == expected <= len(tokens) - 1
    assert getattr(use, f"{tier}_tokens") == expected


def in_redis_only(stage: TierStage, tokens: list[int]) -> None:
    """Take a prompt's blocks out of device and DRAM."""
    for key in stage.submit("names", tokens).block_keys(16, len(tokens) // 16 * 16):
        for pool in (stage.tiers.device, stage.dram.pool):
            if (place := pool.find(key)) is not None:
                pool.drop(place)
    stage.abort("names")
    stage.finish()


def test_a_slow_redis_is_left_alone_and_asked_again_later(monkeypatch):
    """What was learned in bad times must not outlast them."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stage = TierStage(pages=24, slots=48)
    stage.run("1", prompt(1, 6))
    stage.run("again", prompt(1, 6))
    assert len(stage.redis.values) == 6
    for _ in range(10):
        stage.tiers.cost.observe_load("redis", 0, 10.0)
        stage.tiers.cost.observe_load("redis", 6, 60.0)
    found = []
    for turn in range(30):
        in_redis_only(stage, prompt(1, 6))
        stage.redis.asked = 0
        found.append(stage.run(f"turn {turn}", prompt(1, 6)).cache_use.redis_tokens)
        if turn < 4:
            assert stage.redis.asked == 0
        now[0] += 1.0
    assert found[0] == 0
    assert found[-1] == 96


def test_loads_that_come_late_are_soon_not_tried(monkeypatch):
    """No prompt but two, and then one in a while, waits for what does not come in time."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stage = TierStage(pages=24, slots=48)
    stage.run("1", prompt(1, 6))
    stage.run("again", prompt(1, 6))
    stage.redis.late = True

    def turn() -> CacheUse:
        in_redis_only(stage, prompt(1, 6))
        now[0] += 1.0
        return stage.run(f"turn {now}", prompt(1, 6)).cache_use

    reasons = [turn().runs[0].miss for _ in range(12)]
    assert reasons[:3] == [Miss.LATE, Miss.LATE, Miss.LOAD_SLOWER]
    assert reasons.count(Miss.LATE) == 3
    assert reasons.count(Miss.LOAD_SLOWER) == 9
    stage.redis.late = False
    assert [turn().redis_tokens for _ in range(6)][-1] == 96


def test_a_gap_cuts_the_hit():
    stage = TierStage(pages=24, slots=48)
    keys = stage.run("1", prompt(1, 6)).block_keys(16, 96)
    stage.run("again", prompt(1, 6))
    for key in keys:
        stage.tiers.device.drop(stage.tiers.device.find(key))
        stage.dram.pool.drop(stage.dram.pool.find(key))
    del stage.redis.values[keys[2].link]
    use = stage.run("2", prompt(1, 6)).cache_use
    assert use.redis_tokens == use.cached_tokens == 32
    assert [(run.first, run.tier, run.miss) for run in use.runs] == [
        (0, Tier.REDIS, None),
        (2, None, Miss.NEVER_SEEN if use.runs[1].miss is Miss.NEVER_SEEN else use.runs[1].miss),
        (3, None, Miss.AFTER_GAP),
        (6, None, Miss.LAST_TOKEN),
    ]


def test_a_corrupt_block_is_computed_and_counted():
    stage = TierStage(pages=24, slots=48)
    keys = stage.run("1", prompt(1, 4)).block_keys(16, 64)
    stage.run("again", prompt(1, 4))
    for key in keys:
        stage.tiers.device.drop(stage.tiers.device.find(key))
        stage.dram.pool.drop(stage.dram.pool.find(key))
    stage.redis.corrupt.add(keys[1].link)
    use = stage.run("2", prompt(1, 4)).cache_use
    assert use.cached_tokens == 16
    assert use.runs[1].miss is Miss.CORRUPT
    assert stage.tiers.counters[Tier.REDIS].misses["corrupt"] == 1
    stage.check()


def test_a_dead_redis_costs_nothing_and_says_so():
    stage = TierStage()
    stage.redis.up = False
    use = stage.run("1", prompt(1, 4)).cache_use
    assert use.runs[0].miss is Miss.TIER_DOWN
    assert stage.run("2", prompt(1, 4)).cached_tokens == 64


def test_two_prompts_fetch_one_prefix_once():
    stage = TierStage(pages=24, slots=48)
    keys = stage.run("1", prompt(1, 4)).block_keys(16, 64)
    stage.run("again", prompt(1, 4))
    for key in keys:
        stage.tiers.device.drop(stage.tiers.device.find(key))
        stage.dram.pool.drop(stage.dram.pool.find(key))
    before = stage.tiers.counters[Tier.REDIS].loads
    stage.submit("2", prompt(1, 4))
    stage.redis.step()  # the first one's question
    stage.step()
    stage.submit("3", prompt(1, 4))
    stage.finish()
    assert stage.tiers.counters[Tier.REDIS].loads - before == 4
    assert [stage.done[name].cached_tokens for name in "23"] == [64, 64]


def test_others_run_while_one_waits_for_its_kv():
    stage = TierStage()
    stage.run("1", prompt(1, 4))
    push_out(stage)
    stage.submit("waits", prompt(1, 4))
    stage.submit("runs", prompt(9, 0), max_tokens=3)
    for _ in range(6):
        stage.step()
    assert "runs" in stage.done
    assert "waits" in stage.sequences


def test_an_abort_while_loading_frees_pages_only_after_the_transfer():
    stage = TierStage(redis=False)
    stage.run("1", prompt(1, 4))
    push_out(stage)
    stage.submit("2", prompt(1, 4))
    stage.step()
    assert len(stage.scheduler.loading) == 1
    stage.abort("2")
    assert stage.tiers.device.counts().held >= 4
    stage.finish()
    assert stage.tiers.device.counts().held == 0
    assert stage.dram.pool.counts().held == 0


def test_a_failed_transfer_is_computed_instead():
    stage = TierStage(redis=False)
    stage.run("1", prompt(1, 4))
    push_out(stage)
    stage.finish()
    stage.submit("2", prompt(1, 4))
    stage.step()
    stage.copier.fail_next = True
    stage.finish()
    assert stage.done["2"].cached_tokens == 0
    stage.check()


def test_tenants_never_meet_in_any_tier():
    stage = TierStage(slots=10)
    stage.run("1", prompt(1, 4))
    stage.run("again", prompt(1, 4))
    assert stage.run("other", prompt(1, 4), tenant="b").cached_tokens == 0
    push_out(stage, rounds=6)
    assert stage.run("other again", prompt(1, 4), tenant="c").cached_tokens == 0
    assert stage.run("2", prompt(1, 4)).cached_tokens == 64


def test_erasure_reaches_every_tier_and_what_is_under_way():
    stage = TierStage(pages=24, slots=48)
    stage.run("1", prompt(1, 4))
    stage.run("again", prompt(1, 4))
    stage.run("b", prompt(1, 4), tenant="b")
    stage.submit("2", prompt(2, 4), max_tokens=20)
    stage.step()
    for sequence in stage.sequences.values():
        sequence.erased = True
    stage.cache.erase(owner("a").tenant, None)
    assert not any(key.owner == owner("a") for key, _ in stage.redis.values.values())
    stage.finish()
    assert owner("a").tenant not in stage.tiers.device.tenant_blocks()
    assert owner("a").tenant not in stage.dram.pool.tenant_blocks()
    assert stage.run("3", prompt(1, 4)).cached_tokens == 0
    assert stage.run("b again", prompt(1, 4), tenant="b").cached_tokens == 64


def test_kept_prefixes_outlive_others_and_durable_ones_reach_redis():
    stage = TierStage(slots=40)
    stage.run("1", prompt(1, 4), retention=(Retention(64, 3600.0, durable=True),))
    assert len(stage.redis.values) == 4
    push_out(stage, blocks=5, rounds=8)
    assert stage.run("2", prompt(1, 4)).cache_use.device_tokens == 64


def test_a_durable_prefix_is_not_written_at_every_use():
    stage = TierStage(slots=40)
    wish = (Retention(64, 3600.0, durable=True),)
    for name in "12345":
        stage.run(name, prompt(1, 4), retention=wish)
    assert stage.redis.sent == 4
    stage.run("longer", prompt(1, 4), retention=(Retention(64, 2e6, durable=True),))
    assert stage.redis.sent == 8


def test_what_an_empty_redis_has_lost_is_written_again():
    stage = TierStage(slots=40)
    for name in "12":
        stage.run(name, prompt(1, 4))
    keys = stage.done["2"].block_keys(16, 64)
    stage.redis.values.clear()
    stage.run("3", prompt(1, 4))
    assert not stage.redis.values, "it is not asked for what it is known to hold"
    stage.redis.server_lives += 1
    stage.step()
    assert not any(stage.tiers.is_stored(key) for key in keys)
    assert not stage.told.held[Tier.REDIS]
    stage.run("4", prompt(1, 4))
    assert stage.redis.values.keys() == {key.link for key in keys}
    stage.check()


def test_an_answer_from_before_an_erasure_says_nothing_of_what_redis_holds():
    stage = TierStage(pages=24, slots=48)
    for name in "12":
        stage.run(name, prompt(1, 4))
    keys = stage.done["2"].block_keys(16, 64)
    stage.cache.clear_dram()
    stage.tiers.device.clear()
    stage.submit("3", prompt(1, 4))
    stage.step()
    stage.redis.step()  # it has them, and nobody has heard of it yet
    stage.cache.erase(owner("a").tenant, None)
    stage.cache.settle()
    assert not any(stage.tiers.is_stored(key) for key in keys)
    stage.finish()
    assert stage.done["3"].cached_tokens == 0
    stage.check()


def test_saving_writes_everything_that_is_cached(monkeypatch: pytest.MonkeyPatch):
    stage = TierStage(pages=24, slots=48)
    stage.run("1", prompt(1, 4))
    stage.run("2", prompt(2, 4))
    assert not stage.redis.values
    stage.run("again", prompt(2, 4))
    assert len(stage.redis.values) == 4
    stage.redis.values.clear()  # it has pushed out what was written before

    def others_work(_: float) -> None:
        stage.copier.step()
        stage.redis.step()

    monkeypatch.setattr("time.sleep", others_work)
    stage.cache.save(5.0)
    assert len(stage.redis.values) >= 8
    stage.check()


def test_without_a_dram_tier_redis_still_has_a_landing():
    stage = TierStage(keeps=False)
    stage.run("1", prompt(1, 4))
    stage.run("again", prompt(1, 4))
    assert stage.dram.pool.counts().cached == 0
    push_out(stage)
    use = stage.run("2", prompt(1, 4)).cache_use
    assert use.redis_tokens == 64
    assert stage.dram.pool.counts().free == stage.dram.capacity


def test_write_through_copies_down_at_completion():
    stage = TierStage(write_through=True)
    stage.run("1", prompt(1, 4))
    assert stage.dram.pool.counts().cached >= 4


class TieredCacheMachine(RuleBasedStateMachine):
    """Any order of prompts, aborts, transfers, failures and erasures. The stage checks each page
    that a sequence starts from; this checks that the books agree and that all comes to rest."""

    @initialize(redis=st.booleans(), keeps=st.booleans(), through=st.booleans())
    def build(self, redis, keeps, through):
        self.stage = TierStage(
            pages=10, slots=9, redis=redis, keeps=keeps, write_through=through, step_tokens=32
        )
        self.count = 0

    @rule(
        seed=st.integers(1, 3),
        blocks=st.integers(0, 5),
        tail=st.integers(1, 4),
        tenant=st.sampled_from("ab"),
        answer=st.integers(1, 18),
        given=st.sampled_from([0, 0, 1, 17, 40]),
        priority=st.sampled_from([0, 1, 2, 9]),
        kept=st.booleans(),
        weight=st.sampled_from([0.5, 1.0, 4.0]),
        deadline_s=st.sampled_from([None, 1.0, 1e12]),
        tpot_s=st.sampled_from([None, 0.005, 0.3]),
    )
    def ask(
        self,
        seed,
        blocks,
        tail,
        tenant,
        answer,
        given,
        priority,
        kept,
        weight,
        deadline_s,
        tpot_s,
    ):
        self.count += 1
        wish = (Retention(blocks * 16, 3600.0, durable=True),) if kept else ()
        self.stage.submit(
            str(self.count),
            prompt(seed, blocks, tail),
            tenant=tenant,
            max_tokens=given + answer,
            priority=priority,
            given=given,
            retention=wish,
            flow=tenant.encode(),
            weight=weight,
            deadline_s=deadline_s,
            tpot_s=tpot_s,
        )

    @rule(times=st.integers(1, 8), moves=st.booleans())
    def steps(self, times, moves):
        for _ in range(times):
            self.stage.step()
            if moves:
                self.stage.copier.step()
                self.stage.redis.step()

    @rule(
        priority=st.sampled_from([1, 2, 9]),
        newcomer=st.booleans(),
        allowed=st.lists(st.integers(1, 32), min_size=1, max_size=3),
    )
    def interrupted_step(self, priority, newcomer, allowed):
        """Whatever runs beside it, who waits for a step that lies aside keeps slot and pages, and
        who does not is a stream that has a token then."""

        def beside(chunks):
            held = {chunk.sequence: list(chunk.sequence.pages) for chunk in chunks}
            streams = {each.sequence for each in chunks if each.reaches_end and each.tokens == 1}
            preemptions = self.stage.scheduler.preemptions
            if newcomer:
                self.ask(4, 1, 2, "a", 3, 0, 0, False, 1.0, None, None)
            for tokens in allowed:
                generate = {
                    each
                    for each in self.stage.scheduler.running
                    if each.computed >= each.prefill_end
                }
                planned = self.stage.step_beside(priority, tokens)
                assert sum(chunk.tokens for chunk in planned) <= tokens
                others = [each for each in planned if each.sequence not in generate]
                for chunk in planned:
                    if held.pop(chunk.sequence, None) is not None:
                        assert chunk.sequence in streams
                    elif chunk in others and chunk.tokens > 1:
                        assert chunk.sequence.rank.priority < priority
                assert not planned or min(each.sequence.rank.priority for each in others) < priority
                self.stage.copier.step()
            for sequence, pages in held.items():
                assert sequence.slot is not None
                assert sequence.pages == pages
            assert self.stage.scheduler.preemptions == preemptions

        self.stage.step(beside)

    @rule(index=st.integers(0, 5), fails=st.booleans())
    def transfer(self, index, fails):
        self.stage.copier.fail_next = fails
        self.stage.copier.step(index)
        self.stage.copier.fail_next = False

    @rule(index=st.integers(0, 5))
    def redis_answers(self, index):
        self.stage.redis.step(index)

    @rule(late=st.booleans(), up=st.booleans())
    def redis_changes(self, late, up):
        self.stage.redis.late, self.stage.redis.up = late, up

    @rule()
    def redis_loses_a_block(self):
        if self.stage.redis.values:
            del self.stage.redis.values[next(iter(self.stage.redis.values))]

    @precondition(lambda self: self.stage.sequences)
    @rule(data=st.data())
    def leave(self, data):
        self.stage.abort(data.draw(st.sampled_from(sorted(self.stage.sequences))))

    @rule(tenant=st.sampled_from("ab"))
    def erase(self, tenant):
        for sequence in self.stage.sequences.values():
            if sequence.request.owner == owner(tenant):
                sequence.erased = True
        self.stage.cache.erase(owner(tenant).tenant, None)

    @invariant()
    def books_agree(self):
        if hasattr(self, "stage"):
            self.stage.check()

    def teardown(self):
        if hasattr(self, "stage"):
            self.stage.finish()
            self.stage.check()
            assert self.stage.tiers.device.counts().held == 0
            assert self.stage.dram.pool.counts().held == 0
            assert not self.stage.scheduler._pages.leaders


TestTieredCache = TieredCacheMachine.TestCase
TestTieredCache.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
