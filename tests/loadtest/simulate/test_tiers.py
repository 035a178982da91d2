from __future__ import annotations

from loadtest.simulate.clock import Clock
from loadtest.simulate.hardware import BUNDLED_CPU
from loadtest.simulate.job import SimJob
from loadtest.simulate.redis_tier import RedisTier
from loadtest.simulate.tiers import ReplicaTiers
from loadtest.trace import TraceRequest
from policies.cost import CostModel

SIZE = 16


def tiers_of(device_blocks: int, *, dram: int = 0, redis: RedisTier | None = None) -> ReplicaTiers:
    cost = CostModel.given(BUNDLED_CPU.cost)
    return ReplicaTiers(
        Clock(), cost, SIZE, device_blocks=device_blocks, dram_blocks=dram, redis=redis
    )


def asking_for(blocks: list[int]) -> SimJob:
    request = TraceRequest(0.0, len(blocks) * SIZE, 1, blocks)
    return SimJob(0, request, 0, priority=0, flow=b"", weight=1, ttft_s=None, tpot_s=None)


def computed(tiers: ReplicaTiers, job: SimJob) -> None:
    """Its prompt is looked up, computed and released."""
    tiers.look_up(job)
    blocks = job.blocks
    tiers.device.take(len(blocks))
    nodes = []
    for index, block in enumerate(blocks):
        parent = blocks[index - 1] if index else None
        nodes.append(tiers.device.publish(block, parent, tiers.savings_s(index + 1)[index]))
    tiers.prompt_done(job)
    tiers.device.release(nodes)


def test_what_was_asked_for_before_is_in_dram_when_it_is_computed_again() -> None:
    tiers = tiers_of(4, dram=20)
    assert tiers.dram is not None
    computed(tiers, asking_for([1, 2]))
    assert not tiers.dram.blocks
    computed(tiers, asking_for([1, 2]))
    assert set(tiers.dram.blocks) == {1, 2}


def test_with_redis_it_gets_there_through_dram() -> None:
    redis = RedisTier(10)
    tiers = tiers_of(4, dram=20, redis=redis)
    assert tiers.dram is not None
    for _ in range(2):
        computed(tiers, asking_for([1, 2]))
    assert 1 in redis
    assert set(tiers.dram.blocks) == {1, 2}


def test_what_is_in_dram_is_here() -> None:
    tiers = tiers_of(4, dram=20)
    job = asking_for([1, 2, 3])
    for _ in range(2):
        computed(tiers, asking_for([1, 2]))
    assert tiers.here(job, 0) == 2
    assert tiers.here(job, 2) == 2
