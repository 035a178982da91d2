"""Load or compute, ask or not, write or not."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cost import CostModel
from policies.tiering import (
    SecondLook,
    WriteWorth,
    choose_load,
    load_deadline_s,
    probe_is_worth,
    remembered_blocks,
)

BLOCK = 16


def model(redis_block_s: float = 0.4e-3, redis_latency_s: float = 1e-3) -> CostModel:
    """About 4 ms to compute a block, 0.07 ms to copy it from DRAM."""
    cost = CostModel(
        token_flops=0.05e9, weight_bytes=269e6, kv_token_bytes=23040, block_bytes=368640
    )
    for blocks in (0, 64, 1, 32) * 5:
        cost.observe_load("redis", blocks, redis_latency_s + blocks * redis_block_s)
    return cost


def choose(runs, cost, *, start_block=0, prompt_tokens=2000, arrived=False) -> int:
    return choose_load(
        runs,
        start_block=start_block,
        block_tokens=BLOCK,
        prompt_tokens=prompt_tokens,
        cost=cost,
        arrived=arrived,
    )


def test_what_moves_faster_than_it_computes_is_loaded():
    assert choose([("dram", 20), ("redis", 40)], model()) == 2


def test_a_slow_redis_is_left_and_what_is_before_it_loaded():
    assert choose([("dram", 20), ("redis", 40)], model(redis_block_s=50e-3)) == 1


def test_nothing_is_loaded_where_all_moves_are_slower():
    assert choose([("redis", 40)], model(redis_block_s=50e-3)) == 0
    assert choose([], model()) == 0


def test_a_slow_run_is_taken_for_the_sake_of_a_long_fast_one_behind_it():
    cost = model(redis_latency_s=20e-3)
    assert choose([("redis", 1)], cost, prompt_tokens=17) == 0
    assert choose([("redis", 1), ("dram", 100)], cost) == 2


def test_blocks_that_have_arrived_cost_only_the_copy():
    cost = model(redis_block_s=50e-3)
    assert choose([("redis", 40)], cost, arrived=True) == 1


runs_st = st.lists(st.tuples(st.sampled_from(["dram", "redis"]), st.integers(1, 40)), max_size=5)


@settings(max_examples=60, deadline=None)
@given(runs_st, st.integers(0, 50), st.floats(1e-6, 0.1), st.floats(1e-5, 0.5), st.booleans())
def test_no_other_cut_takes_less(runs, start_block, redis_block_s, redis_latency_s, arrived):
    cost = model(redis_block_s, redis_latency_s)
    prompt_tokens = (start_block + sum(blocks for _, blocks in runs)) * BLOCK + 5

    def total_s(cut: int) -> float:
        blocks = sum(n for _, n in runs[:cut])
        redis = 0 if arrived else sum(n for tier, n in runs[:cut] if tier == "redis")
        cached = (start_block + blocks) * BLOCK
        load_s = cost.load_s("dram", blocks) if blocks else 0.0
        load_s += cost.load_s("redis", redis) if redis else 0.0
        return load_s + cost.prefill_s(prompt_tokens - cached, cached)

    chosen = choose(
        runs, cost, start_block=start_block, prompt_tokens=prompt_tokens, arrived=arrived
    )
    assert total_s(chosen) == min(total_s(cut) for cut in range(len(runs) + 1))


def test_redis_is_asked_only_for_clearly_more_than_a_round_trip():
    cost = model(redis_latency_s=2e-3)
    assert not probe_is_worth(1, BLOCK, 0, cost)
    assert probe_is_worth(64, BLOCK, 0, cost)
    assert not probe_is_worth(0, BLOCK, 0, cost)


def test_redis_is_not_asked_for_what_it_would_bring_too_slowly():
    assert not probe_is_worth(64, BLOCK, 0, model(redis_block_s=20e-3))


def test_a_load_may_take_as_long_as_computing():
    cost = model()
    assert load_deadline_s(160, 512, cost) == cost.prefill_s(512, 160)
    fast = CostModel(token_flops=1, weight_bytes=1, kv_token_bytes=1, block_bytes=1)
    assert load_deadline_s(0, 16, fast) == 0.005


def ask(worth: WriteWorth, hits: int = 0) -> bool:
    return worth.is_worth(hits=hits, saving_s=4e-3, load_s=0.1e-3, store_s=0.1e-3)


def test_a_fresh_system_writes():
    assert ask(WriteWorth())


def test_unique_traffic_stops_the_writing_and_reuse_brings_it_back():
    worth = WriteWorth()
    written = 0
    for _ in range(1000):
        written += ask(worth)
        worth.pushed_out()
    assert written < 500
    assert not ask(worth)
    resumed = None
    for index in range(300):
        worth.pushed_out()
        worth.asked_again()
        if resumed is None and ask(worth):
            resumed = index
    assert resumed is not None
    assert resumed < 100


def test_what_was_hit_is_written_unless_moving_costs_more_than_computing():
    worth = WriteWorth()
    worth.pushed_out(5000)
    worth.forgotten(5000)
    assert ask(worth, hits=1)
    assert not worth.is_worth(hits=9, saving_s=1e-3, load_s=2e-3, store_s=0)


def test_now_and_then_one_is_written_anyway():
    worth = WriteWorth()
    worth.pushed_out(5000)
    written = [ask(worth) for _ in range(1024)]
    assert sum(written) == 4


@settings(max_examples=30, deadline=None)
@given(st.floats(0.02, 0.98), st.integers(1, 400), st.integers(400, 3000), st.integers(0, 99))
def test_the_estimate_is_right_in_a_steady_state(share, return_after, forget_after, seed):
    rng = random.Random(seed)
    worth = WriteWorth()
    fates = [rng.random() < share for _ in range(9000)]
    for now in range(len(fates)):
        worth.pushed_out()
        if now >= return_after and fates[now - return_after]:
            worth.asked_again()
        if now >= forget_after and not fates[now - forget_after]:
            worth.forgotten()
    assert worth.p_reuse == pytest.approx(share, abs=0.08)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["pushed_out", "asked_again", "forgotten"]), st.integers(0, 1000)
        ),
        max_size=50,
    ),
    st.floats(0.01, 0.99),
)
def test_the_chance_is_always_a_chance(events, prior):
    worth = WriteWorth(prior=prior)
    assert worth.p_reuse == pytest.approx(prior)
    for event, n in events:
        getattr(worth, event)(n)
        assert 0 < worth.p_reuse < 1


@pytest.mark.parametrize("bad", [{"prior": 0.0}, {"prior": 1.0}, {"half_life_blocks": 0}])
def test_nonsense_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        WriteWorth(**bad)


class GhostedTier:
    """A pool of `size` blocks in LRU order over a ghost list, writing down what is worth it."""

    def __init__(self, size: int, ghosts: int) -> None:
        self.size, self.ghosts = size, ghosts
        self.held: OrderedDict[int, int] = OrderedDict()  # block -> hits
        self.ghost: OrderedDict[int, None] = OrderedDict()
        self.worth = WriteWorth()
        self.decisions: list[bool] = []

    def ask(self, block: int) -> None:
        if block in self.held:
            self.held[block] += 1
            self.held.move_to_end(block)
            return
        if block in self.ghost:
            del self.ghost[block]
            self.worth.asked_again()
        self.held[block] = 0
        if len(self.held) > self.size:
            victim, hits = self.held.popitem(last=False)
            self.decisions.append(ask(self.worth, hits))
            self.worth.pushed_out()
            self.ghost[victim] = None
        if len(self.ghost) > self.ghosts:
            self.ghost.popitem(last=False)
            self.worth.forgotten()


def test_writing_follows_the_traffic():
    tier = GhostedTier(size=256, ghosts=4096)
    unique = iter(range(10**6, 10**7))
    for _ in range(1256):
        tier.ask(next(unique))
    assert sum(tier.decisions[-100:]) <= 1, "unique traffic is still written after 1,000 blocks"
    for _ in range(10_000):
        tier.ask(next(unique))
    assert sum(tier.decisions[-1000:]) <= 5

    def turn_round() -> None:  # a working set of four times the pool
        for block in range(1024):
            tier.ask(block)

    turn_round()
    before = len(tier.decisions)
    turn_round()
    assert sum(tier.decisions[before + 300 :]) == len(tier.decisions) - before - 300
    turn_round()
    assert all(tier.decisions[-1024:])


def test_a_second_look_comes_once_in_a_while():
    look = SecondLook(every_s=5.0)
    assert [second for second in range(100, 120) if look.due(float(second))] == [105, 110, 115]


@pytest.mark.parametrize(
    ("kept", "remembered"),
    [(0, 32_768), (16_384, 32_768), (40_000, 80_000), (131_072, 262_144), (10**9, 262_144)],
)
def test_twice_the_blocks_that_are_kept_are_remembered(kept: int, remembered: int) -> None:
    assert remembered_blocks(kept) == remembered
