"""A replica in another process, as long as that process is well."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from cache.block_pool import Share
from engine.request import FinishReason
from gateway.dispatch.member import Condition, Health
from gateway.replica import ReplicaUnavailable
from gateway.replicas.worker.replica import WorkerReplica
from tests.gateway.replicas.puppet_worker import COST, ENDLESS, FAIL, GUSH, expected
from tests.gateway.replicas.worker_stage import (
    PATIENCE_S,
    Stage,
    answer,
    child_pids,
    is_gone,
    request,
    running,
    started_with,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def replica(stage: Stage) -> AsyncIterator[WorkerReplica]:
    """One for all tests of this file, with four places."""
    async with running(stage, max_open=100) as serving:
        [pid] = child_pids()
        yield serving
    assert is_gone(pid)
    assert child_pids() == []
    conditions = [Condition.STARTING, Condition.SERVING, Condition.DRAINING, Condition.DOWN]
    assert stage.conditions == conditions
    assert len(stage.facts) == 1


async def test_it_serves_and_has_said_what_there_is_to_know(replica, stage) -> None:
    assert replica.health() == Health(Condition.SERVING)
    assert replica.coefficients() == COST
    assert stage.progress[0] == ("weights", 0, 4)
    assert stage.progress[-1] == ("weights", 4, 4)
    assert stage.facts[0].generation_defaults == {"top_p": 0.5}
    tokens, reason = await answer(replica, request("a", [1, 2]))
    assert tokens == expected([1, 2])
    assert reason is FinishReason.LENGTH
    assert replica.stats().running == 0
    assert replica.stats().alive


async def test_a_hundred_streams_at_once(replica) -> None:
    prompts = [[n, n + 1] for n in range(100)]
    async with asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(
            *(answer(replica, request(f"r{n}", prompt)) for n, prompt in enumerate(prompts))
        )
    assert [tokens for tokens, _ in answers] == [expected(prompt) for prompt in prompts]


async def test_a_slow_consumer_gets_larger_pieces_and_misses_nothing(replica, stage) -> None:
    async with replica.submit(request("a", [GUSH, 1], 400)) as stream:
        first = await anext(stream)
        await stage.until(lambda: stage.reports[-1].outputs[0].finish_reason is not None)
        rest = await anext(stream)
    assert len(rest.token_ids) > 1
    assert [*first.token_ids, *rest.token_ids] == expected([GUSH, 1], 400)
    assert rest.finish_reason is FinishReason.LENGTH


async def test_leaving_early_frees_the_place_at_the_engine(replica, stage) -> None:
    async with replica.submit(request("a", [ENDLESS])) as stream:
        await anext(stream)
    await stage.until(lambda: replica.stats().running == 0)
    assert stage.reports[-1].outputs[0].finish_reason is FinishReason.ABORT


async def test_a_full_replica_refuses_until_a_place_is_free(replica) -> None:
    async def hold(name: str, there: asyncio.Semaphore) -> None:
        async with replica.submit(request(name, [ENDLESS])):
            there.release()
            await asyncio.Event().wait()

    there = asyncio.Semaphore(0)
    holders = [asyncio.create_task(hold(f"h{n}", there)) for n in range(100)]
    for _ in holders:
        await there.acquire()
    with pytest.raises(ReplicaUnavailable) as refused:
        await answer(replica, request("b", [1]))
    assert refused.value.full
    for holder in holders:
        holder.cancel()
    await asyncio.wait(holders)
    assert (await answer(replica, request("b", [1])))[0] == expected([1])


async def test_a_request_that_fails_alone_says_so_and_nobody_else_notices(replica) -> None:
    async with replica.submit(request("a", [FAIL])) as stream:
        output = await anext(stream)
        assert (output.finish_reason, output.error) == (FinishReason.ERROR, "as ordered")
        assert (await answer(replica, request("b", [1])))[0] == expected([1])
    assert replica.health().condition is Condition.SERVING


async def test_what_is_asked_of_the_cache_reaches_the_engine_and_comes_back(replica) -> None:
    erased = await replica.erase_cache(b"tenant", None)
    assert (erased.device, erased.dram, erased.redis) == (6, 0, None)
    assert replica.cache_stats().tiers[0].evictions == 1  # as it is after the answer
    await replica.flush_cache()
    assert replica.cache_stats().tiers[0].evictions == 2
    snapshot = await replica.block_snapshot()
    assert (snapshot.epoch, snapshot.seq, snapshot.snapshot) == (7, 3, True)
    await replica.set_shares({b"a": Share(1, 2), b"b": Share(0, None)}, {}, {b"c": 5})
    share = replica.cache_stats().tenants[0]
    assert (share.device, share.dram, share.redis) == (2, 0, 5)
    with pytest.raises(ReplicaUnavailable, match="stopped"):
        await replica.erase_cache(b"cannot", None)
    answers = await asyncio.gather(
        *(replica.erase_cache(b"x" * n, b"") for n in range(20)), replica.flush_cache()
    )
    assert [each.device for each in answers] == [*range(20), 0]


async def test_its_model_and_keys_show_neither_in_arguments_nor_in_the_environment(replica) -> None:
    [pid] = child_pids()
    arguments, environment = started_with(pid)
    assert b"bundled" not in arguments + environment
    assert b"very-secret" not in arguments + environment
    assert b"FOREBAY_NATIVE=off" in environment  # what is about the machine goes on


async def test_signals_to_all_processes_of_a_service_are_for_the_gateway(replica, stage) -> None:
    async with replica.submit(request("a", [ENDLESS])) as stream:
        await anext(stream)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(child_pids()[0], number)
        assert (await answer(replica, request("b", [1], 50)))[0] == expected([1], 50)
        await anext(stream)
    assert replica.health().condition is Condition.SERVING
