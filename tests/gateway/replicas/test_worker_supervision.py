"""What becomes of a worker, and of what it was doing, when its process is not well."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
import uvloop

from cache.block_pool import Share
from engine.errors import ModelLoadError
from engine.report import EngineStats
from gateway.dispatch.member import Condition, Health
from gateway.replica import ReplicaUnavailable
from gateway.replicas.worker.life import Life
from gateway.replicas.worker.messages import Beat
from tests.gateway.replicas.puppet_worker import DIE, ENDLESS, EXIT, FREEZE, GARBLE, expected
from tests.gateway.replicas.worker_stage import (
    PATIENCE_S,
    ROOT,
    Stage,
    answer,
    child_pids,
    is_gone,
    make_replica,
    puppet_order,
    request,
    running,
)


def loop_s() -> float:
    return asyncio.get_running_loop().time()


def reasons(stage: Stage) -> list[str]:
    """Why it was down, each time."""
    return [health.reason for health in stage.health if health.condition is Condition.DOWN]


async def lost_stream(replica, each) -> ReplicaUnavailable:
    """Consumes a stream that is going to be lost; the error it ends with."""
    with pytest.raises(ReplicaUnavailable) as lost:
        await answer(replica, each)
    return lost.value


def test_a_worker_that_is_lost_ends_its_streams_and_comes_back() -> None:
    """It is killed, its step loop dies, it exits, it talks nonsense: one life after another. On
    uvloop, which serves in production; the other tests are on asyncio's own loop."""

    async def main(stage: Stage) -> None:
        async with running(stage) as replica:
            for life, prompt in enumerate(([ENDLESS, 0], [DIE], [EXIT], [GARBLE]), start=1):
                await lose_one(replica, stage, life, prompt)
            assert replica.stats().running == 0

    stage = Stage()
    with (
        structlog.testing.capture_logs() as lines,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(main(stage))
    assert len(stage.facts) == 5
    told = [line for line in lines if line["event"] == "worker lost"]
    assert [line["again_in_s"] for line in told] == [0.05, 0.1, 0.2, 0.2]
    for line, why in zip(told, ("SIGKILL", "engine", "code 3", "understood"), strict=True):
        assert why in line["reason"]


async def lose_one(replica, stage: Stage, life: int, prompt: list[int]) -> None:
    """Six streams that are lost with the worker, by a prompt that does it or a signal."""
    await stage.until_lives(life)
    [pid] = child_pids()
    others = [
        asyncio.create_task(lost_stream(replica, request(f"o{n}", [ENDLESS, n]))) for n in range(5)
    ]
    async with replica.submit(request("a", prompt)) as stream, asyncio.timeout(PATIENCE_S):
        await anext(stream)
        if prompt[0] == ENDLESS:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(ReplicaUnavailable) as lost:
            async for _ in stream:
                pass
        assert lost.value.blames_replica
        assert replica.health().condition is not Condition.SERVING
        assert not replica.stats().alive
        with pytest.raises(ReplicaUnavailable):
            await answer(replica, request("while-down", [1]))
        await replica.set_shares({b"a": Share(1, 2)}, {}, {b"c": life})
        await stage.until_lives(life + 1)
        await stage.until(lambda: replica.cache_stats().tenants[0].redis == life)
        # the new life takes a request of the same name while the old scope is open
        assert (await answer(replica, request("a", [1])))[0] == expected([1])
        assert is_gone(pid)
        for error in await asyncio.gather(*others):
            assert error.blames_replica


async def test_a_stopped_process_is_found_out_killed_and_replaced() -> None:
    """Whatever was on its way to it: streams, questions, prompts that its socket has no room for;
    and none of it holds up the loop."""
    stage = Stage()
    async with running(stage, hang_s=1.0) as replica, asyncio.timeout(PATIENCE_S):
        [pid] = child_pids()
        long = list(range(200_000, 500_000))
        async with replica.submit(request("a", [ENDLESS])) as stream:
            await anext(stream)
            os.kill(pid, signal.SIGSTOP)
            stopped_s = loop_s()
            lost = [
                asyncio.create_task(lost_stream(replica, request(f"r{n}", long))) for n in range(4)
            ]
            asked = asyncio.create_task(replica.flush_cache())
            ticks = 0
            while not all(task.done() for task in lost):
                await asyncio.sleep(0.01)
                ticks += 1
            assert 0.5 < loop_s() - stopped_s < 5
            assert ticks > 20
            with pytest.raises(ReplicaUnavailable):
                await asked
            with pytest.raises(ReplicaUnavailable):
                async for _ in stream:
                    pass
        with pytest.raises(ReplicaUnavailable) as refused:
            await replica.block_snapshot()
        assert not refused.value.blames_replica
        assert replica.cache_stats().tiers == ()
        await stage.until_lives(2)
        assert pid not in child_pids()
        assert (await answer(replica, request("b", long)))[0] == expected(long)
    assert "no sign of life" in reasons(stage)[0]


async def test_a_long_step_is_no_hang_and_a_step_without_end_is_one() -> None:
    """The puppet's loop stands still while its process goes on telling so."""
    stage = Stage()
    async with running(stage, hang_s=1.0, step_s=1.3) as replica, asyncio.timeout(PATIENCE_S):
        started_s = loop_s()
        lost = await lost_stream(replica, request("a", [FREEZE]))
        assert lost.blames_replica
        assert loop_s() - started_s > 1.2
    assert "at one step" in reasons(stage)[0]


async def test_a_gateway_that_stood_still_itself_blames_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was told meanwhile is unread yet: how old a step was when it was told of is all there is
    to know of it."""
    now_s = 1000.0
    monkeypatch.setattr("gateway.replicas.worker.life.time.monotonic", lambda: now_s)
    life = Life(
        on_ready=lambda _: None,
        on_step=lambda _: None,
        on_lost=lambda _: None,
        progress=Stage().on_progress,
    )
    stats = EngineStats(
        waiting=0,
        running=1,
        pages_free=0,
        pages_cached=0,
        pages_held=1,
        pages_total=1,
        preemptions=0,
        steps=1,
        alive=True,
        last_step_age_s=2.0,
    )
    life.receive(Beat(stats, None))
    now_s += 70.0
    assert (life.silent_s, life.step_age_s) == (70.0, 72.0)
    life.heard()
    assert (life.silent_s, life.step_age_s) == (0.0, 2.0)
    now_s += 1.0
    assert (life.silent_s, life.step_age_s) == (1.0, 3.0)


async def test_draining_waits_for_the_running_and_closing_lets_the_worker_save(
    tmp_path: Path,
) -> None:
    stage = Stage()
    saved = tmp_path / "saved"
    async with running(stage, puppet_order(PUPPET_SAVES=str(saved))) as replica:
        async with replica.submit(request("a", [1], 50)) as stream:
            draining = asyncio.create_task(replica.drain(PATIENCE_S))
            await stage.until(lambda: replica.health().condition is Condition.DRAINING)
            with pytest.raises(ReplicaUnavailable) as refused:
                await answer(replica, request("late", [1]))
            assert not refused.value.blames_replica
            assert replica.health().final
            assert not draining.done()
            assert sum([len(output.token_ids) async for output in stream]) == 50
        async with asyncio.timeout(PATIENCE_S):
            await draining
    assert saved.read_text() == "saved"
    assert stage.health[-1] == Health(Condition.DOWN, "stopped", final=True)
    await replica.close()


async def test_closing_cuts_streams_off_without_blame() -> None:
    with structlog.testing.capture_logs() as lines:
        async with running(Stage()) as replica:
            streams = [
                asyncio.create_task(lost_stream(replica, request(f"r{n}", [ENDLESS])))
                for n in range(3)
            ]
            await asyncio.sleep(0)
            await replica.close()
            for lost in await asyncio.gather(*streams):
                assert not lost.blames_replica
    assert child_pids() == []
    # what it logged is in our log, and nothing of ours says that it was lost
    assert all(line.pop("replica") == "m/0" for line in lines)
    assert lines == [
        {
            "event": "a line with arguments",
            "log_level": "warning",
        },
        {
            "event": "the worker wrote",
            "line": "a line of no form",
            "log_level": "warning",
        },
    ]


async def test_a_worker_that_does_not_stop_is_killed() -> None:
    async with running(Stage(), stop_s=0.2, terminate_s=0.2, hang_s=60.0) as replica:
        os.kill(child_pids()[0], signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_S):
            await replica.close()
    assert child_pids() == []


async def test_a_worker_lost_while_draining_is_not_started_again() -> None:
    stage = Stage()
    async with running(stage) as replica:
        await replica.drain(0.0)
        os.kill(child_pids()[0], signal.SIGKILL)
        await stage.until(lambda: stage.health[-1] == Health(Condition.DOWN, "stopped", final=True))
        await stage.until(lambda: child_pids() == [])
    assert len(stage.facts) == 1


async def test_a_model_that_cannot_be_loaded_is_told_to_whoever_waits() -> None:
    stage = Stage()
    replica = make_replica(stage, puppet_order(PUPPET_LOADING="fails"))
    with pytest.raises(ModelLoadError, match=re.escape("/model: no such file or directory")):
        await replica.start(stage.on_progress)
    crashes = make_replica(stage, puppet_order(PUPPET_LOADING="crashes"))
    with pytest.raises(ModelLoadError, match="code 9"):
        await crashes.start(stage.on_progress)
    nothing = make_replica(stage, replace(puppet_order(), program=("/no/such/program",)))
    with pytest.raises(ModelLoadError, match="lost while it was loading"):
        await nothing.start(stage.on_progress)
    assert child_pids() == []
    assert stage.facts == []


async def test_whoever_waits_may_change_his_mind() -> None:
    class Enough(Exception):
        pass

    def progress(what: str, done: int, total: int) -> None:
        if (what, done) == ("weights", 1):
            raise Enough

    replica = make_replica(Stage(), puppet_order(PUPPET_LOADING="drags on"))
    with pytest.raises(Enough):
        await replica.start(progress)
    again = make_replica(Stage(), puppet_order(PUPPET_LOADING="drags on"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await again.start(lambda *_: None)
    assert child_pids() == []


async def test_a_worker_ends_with_its_gateway() -> None:
    program = """
import asyncio, sys
from tests.gateway.replicas.worker_stage import Stage, child_pids, make_replica, puppet_order

async def main():
    stage = Stage()
    replica = make_replica(stage, puppet_order())
    await replica.start(stage.on_progress)
    print("worker", *child_pids(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert gateway.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        while not (line := await gateway.stdout.readline()).startswith(b"worker "):
            assert line, "it ended too early"
        pid = int(line.split()[1])
        assert not is_gone(pid)
        gateway.kill()
        await gateway.wait()
        await Stage().until(lambda: is_gone(pid))
