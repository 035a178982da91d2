"""The same text from every tier, whatever happens meanwhile."""

from __future__ import annotations

import os
import random
import time

import pytest

from cache.block import Tier
from cache.block_pool import Share
from cache.report import Miss
from tests.cache.redis_blocks import running_store
from tests.cache.valkey import running_valkey
from tests.engine.tier_traffic import ColdRuns, Traffic
from tests.engine.tiered_engines import (
    MAX_CONTEXT,
    TENANTS,
    ConstantCost,
    FickleCost,
    ask,
    owner_of,
    running_stage,
    tokens,
    use_constant_cost,
)

SOAK_S = float(os.environ.get("FOREBAY_SOAK_S", "0"))

pytestmark = pytest.mark.usefixtures("loads_win")


@pytest.fixture(scope="module")
def valkey(tmp_path_factory):
    with running_valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def redis_url(valkey):
    """An empty Redis."""
    with valkey.client() as client:
        client.flushall()
    return valkey.url


@pytest.fixture
def store(redis_url):
    with running_store(redis_url) as store:
        yield store


@pytest.fixture(scope="module")
def cold():
    runs = ColdRuns()
    yield runs
    runs.close()


@pytest.fixture
def loads_win(monkeypatch):
    use_constant_cost(monkeypatch)


def prompts_at_edges(block_tokens: int) -> list[list[int]]:
    lengths = [1, block_tokens - 1, block_tokens, block_tokens + 1]
    lengths += [n * block_tokens + d for n in (2, 5) for d in (-1, 0, 1)]
    return [tokens(("edge", length), length) for length in lengths]


@pytest.mark.parametrize("block_tokens", [16, 32])
@pytest.mark.parametrize("kind", ["native", "torch"])
def test_each_tier_gives_the_cold_text(kind, block_tokens, store, cold):
    """From the device, from DRAM, from Redis, each alone, for prompts around block boundaries."""
    prompts = prompts_at_edges(block_tokens)
    with running_stage(kind, store, block_tokens=block_tokens, write_through=True) as stage:
        stage.run(ask(f"cold {i}", prompt) for i, prompt in enumerate(prompts))
        for i, prompt in enumerate(prompts):
            last = len(prompt) - 1
            # a full last block counts but for its last token; below the device, tails do not
            readable = min(len(prompt) // block_tokens * block_tokens, last)
            use = stage.run_one(ask(f"device {i}", prompt))
            assert readable <= use.device_tokens == use.cached_tokens <= last
            stage.wait_quiet()
            stage.drop(0, None, stage.asked[f"cold {i}"])
            use = stage.run_one(ask(f"dram {i}", prompt))
            assert use.dram_tokens == readable
            assert use.cached_tokens == use.device_tokens + readable <= last
            stage.wait_quiet()
            stage.drop(0, 0, stage.asked[f"cold {i}"])
            use = stage.run_one(ask(f"redis {i}", prompt))
            assert use.redis_tokens == readable
            assert use.cached_tokens == use.device_tokens + readable <= last
        stage.check()
        cold.check(stage, kind, block_tokens)


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_mixed_tiers_give_the_cold_text(kind, store, cold):
    """Every cut of one prompt into device, DRAM, Redis and nothing, in this order."""
    prompt = tokens("mixed", 6 * 16 + 5)
    draw = random.Random(5)
    cuts = sorted({tuple(sorted(draw.choices(range(7), k=3))) for _ in range(20)})
    with running_stage(kind, store, write_through=True) as stage:
        stage.run_one(ask("first", prompt))
        stage.run_one(ask("second", prompt))
        stage.wait_quiet()
        for device, dram, redis in cuts:
            # all tiers hold all; then each keeps its leading blocks only
            stage.run_one(ask(f"fill {device} {dram} {redis}", prompt))
            stage.wait_quiet()
            last = prompt[: 16 * redis] + tokens((device, dram, redis), 6 * 16 + 5 - 16 * redis)
            stage.drop(device, dram, stage.asked["first"])
            use = stage.run_one(ask(f"mixed {device} {dram} {redis}", last))
            assert use.device_tokens == 16 * device
            assert use.dram_tokens == 16 * (dram - device)
            assert use.redis_tokens == 16 * (redis - dram)
            stage.wait_quiet()
        stage.check()
        cold.check(stage, kind)


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_preempted_sequences_go_on_with_the_cold_text(kind, store, cold):
    start = tokens("start", 32)
    with running_stage(kind, store, blocks=18, dram_blocks=24) as stage:
        stage.run(ask(f"{i}", [*start, *tokens(i, 8 * i)], 90) for i in range(6))
        assert stage.engine.stats().preemptions > 0
        stage.check()
        cold.check(stage, kind)


def test_a_prompt_of_less_than_a_block_only_misses_its_last_token(cold):
    with running_stage("torch") as stage:
        uses = [stage.run_one(ask(name, tokens(name, 9))) for name in ("one", "two")]
        assert [run.miss for use in uses for run in use.runs] == [Miss.LAST_TOKEN] * 2
        stage.check()


CASES = [
    # kind, block_tokens, blocks, dram_blocks, write_through, encrypt
    ("native", 16, 24, 40, False, False),  # pages for little more than the longest sequence
    ("native", 16, 48, 24, True, True),
    ("native", 32, 12, 20, False, True),
    ("native", 16, 20, 0, False, False),  # Redis with nothing but a landing
    ("torch", 16, 24, 40, True, False),
    ("torch", 32, 16, 12, False, True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_random_traffic_gives_the_cold_text_and_survives_a_restart(case, redis_url, cold):
    kind, block_tokens, blocks, dram_blocks, write_through, encrypt = case
    traffic = Traffic(seed=CASES.index(case), block_tokens=block_tokens)
    options = {
        "blocks": blocks,
        "block_tokens": block_tokens,
        "dram_blocks": dram_blocks,
        "write_through": write_through,
    }
    from_redis = 0
    for _ in range(2):  # the second finds in Redis what the first left
        with (
            running_store(redis_url, encrypt=encrypt) as store,
            running_stage(kind, store, **options) as stage,
        ):
            traffic.send(stage, 40)
            stage.check()
            cold.check(stage, kind, block_tokens)
            from_redis = stage.tier(Tier.REDIS).hits
    assert from_redis > 0


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_the_text_does_not_depend_on_what_is_decided(kind, store, cold, monkeypatch):
    use_constant_cost(monkeypatch, FickleCost)
    traffic = Traffic(seed=100, block_tokens=16)
    for _ in range(2):
        with running_stage(kind, store, blocks=24, dram_blocks=32) as stage:
            traffic.send(stage, 40)
            stage.check()
            cold.check(stage, kind)


@pytest.mark.skipif(not SOAK_S, reason="FOREBAY_SOAK_S is not set")
def test_soak(valkey, cold, monkeypatch):
    """Random configurations and traffic; now and then an erasure, a cleared Redis, a restart."""
    until_s = time.monotonic() + SOAK_S
    seed = int(os.environ.get("FOREBAY_SOAK_SEED", "1000"))
    while time.monotonic() < until_s:
        seed += 1
        draw = random.Random(seed)
        kind, block_tokens = draw.choice(["native", "native", "torch"]), draw.choice([16, 32])
        longest = -(-MAX_CONTEXT // block_tokens)
        options = {
            "blocks": longest + draw.choice([0, 1, 3, 8, 30]),
            "block_tokens": block_tokens,
            "dram_blocks": draw.choice([0, 1, 4, 16, 64]),
            "write_through": draw.random() < 0.4,
        }
        traffic = Traffic(seed, block_tokens, abort_share=draw.choice([0.0, 0.3]))
        use_constant_cost(monkeypatch, draw.choice([ConstantCost, FickleCost]))
        print(seed, kind, options)  # noqa: T201  # where a failure happened
        with running_store(valkey.url, encrypt=draw.random() < 0.3) as store:
            for _ in range(draw.randint(1, 3)):
                with running_stage(kind, store, **options) as stage:
                    for _ in range(draw.randint(1, 3)):
                        disturb(stage, valkey, draw)
                        traffic.send(stage, draw.randint(4, 40), threads=draw.randint(1, 6))
                        stage.check()
                    cold.check(stage, kind, block_tokens)


def disturb(stage, valkey, draw):
    """Between two bursts of traffic."""
    what = draw.choice(["nothing", "nothing", "erase", "flush", "middle", "device", "shares"])
    if what == "erase":
        stage.engine.erase_cache(owner_of(draw.choice(TENANTS)).tenant, None)
    elif what == "flush":
        with valkey.client() as client:
            client.flushall()
    elif what == "middle":
        with valkey.client() as client:
            for key in draw.sample(list(client.scan_iter()), k=min(5, client.dbsize())):
                client.delete(key)
    elif what == "device":
        stage.engine.call(stage.cache.device.clear)
    elif what == "shares":
        pages = stage.executor.pages.shape[0]
        names = [owner_of(tenant).tenant for tenant in TENANTS]
        stage.engine.set_shares(
            {name: Share(draw.choice([0, 2]), draw.choice([None, 3, pages])) for name in names},
            {name: Share(draw.choice([0, 1]), draw.choice([None, 0, 5])) for name in names},
            {name: draw.choice([1 << 20, 1 << 16]) for name in names},
        )
