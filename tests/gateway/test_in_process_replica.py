"""The replica over an engine's thread: hand-over, coalescing, ends of every kind."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from cache.report import CacheUse
from engine.errors import EngineError
from engine.report import EngineStats, StepReport
from engine.request import EngineOutput, EngineRequest, FinishReason
from engine.sampling_params import SamplingParams
from gateway.replica import ReplicaUnavailable
from gateway.replicas.in_process import InProcessReplica
from tests.gateway.fakes import COST


class PuppetEngine:
    """Does nothing by itself; a test makes it report, from a thread of its own."""

    def __init__(self, sink) -> None:
        self.sink = sink
        self.alive = True
        self.submitted: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.closed = 0

    def start(self) -> None:
        pass

    def submit(self, request: EngineRequest) -> None:
        if not self.alive:
            raise EngineError("the engine has stopped")
        self.submitted.append(request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, 0, 0, 0, 0, self.alive, 0.0)

    def close(self) -> None:
        self.closed += 1
        outputs = [last_words(request.request_id) for request in self.submitted]
        self.submitted = []
        self.sink(StepReport(tuple(outputs), 0.0, 0, 0, self.stats()))

    def report(self, *outputs: EngineOutput) -> None:
        """One step's report, as the engine's thread makes it."""
        report = StepReport(outputs, 0.01, 1, 1, self.stats())
        thread = threading.Thread(target=self.sink, args=(report,))
        thread.start()
        thread.join()


def request(request_id: str = "r") -> EngineRequest:
    return EngineRequest(request_id, [1, 2, 3], SamplingParams(max_tokens=9), None)


def token(token_id: int, request_id: str = "r", finish: FinishReason | None = None, **fields):
    return EngineOutput(request_id, (token_id,), (), 16, finish, **fields)


def last_words(request_id: str = "r", reason: FinishReason = FinishReason.ABORT) -> EngineOutput:
    return EngineOutput(request_id, (), (), 0, reason, error="why")


class Bench:
    def __init__(self, max_open: int = 4) -> None:
        self.seen: list[tuple[str, StepReport]] = []
        self.replica = InProcessReplica(
            "m/0",
            self._open,
            max_open=max_open,
            cost=COST,
            observe=lambda name, report: self.seen.append((name, report)),
        )
        self.replica.start()

    def _open(self, sink) -> PuppetEngine:
        self.engine = PuppetEngine(sink)
        return self.engine


async def test_tokens_come_through_and_a_finished_request_is_not_aborted():
    bench = Bench()
    async with bench.replica.submit(request()) as stream:
        bench.engine.report(token(5))
        assert (await anext(stream)).token_ids == (5,)
        bench.engine.report(token(6, finish=FinishReason.STOP, stopped_by_token=True))
        last = await anext(stream)
        assert last.finish_reason is FinishReason.STOP
        assert last.stopped_by_token
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert bench.engine.aborted == []
    assert [name for name, _ in bench.seen] == ["m/0", "m/0"]


async def test_what_nobody_took_comes_as_one():
    bench = Bench()
    async with bench.replica.submit(request()) as stream:
        for i in range(5):
            bench.engine.report(token(i), token(99, "unknown"))
        await asyncio.sleep(0.01)
        assert (await anext(stream)).token_ids == (0, 1, 2, 3, 4)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        bench.engine.report(token(7))
        assert (await waiting).token_ids == (7,)


async def test_the_word_on_the_cache_survives_being_joined_with_what_comes_after():
    bench = Bench()
    use, later = CacheUse(16, device_tokens=16), CacheUse(16, device_tokens=32)
    async with bench.replica.submit(request()) as stream:
        bench.engine.report(token(1, cache_use=use))
        bench.engine.report(token(2))
        bench.engine.report(token(3, cache_use=later))
        await asyncio.sleep(0.01)
        joined = await anext(stream)
    assert joined.token_ids == (1, 2, 3)
    assert joined.cache_use is use


async def test_leaving_early_aborts_on_every_path():
    bench = Bench()
    async with bench.replica.submit(request("a")):
        pass
    with pytest.raises(ZeroDivisionError):
        async with bench.replica.submit(request("b")):
            raise ZeroDivisionError

    async def consume() -> None:
        async with bench.replica.submit(request("c")) as stream:
            await anext(stream)

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.engine.aborted == ["a", "b", "c"]
    bench.engine.report(token(1, "c"))  # late words of the dead are nobody's
    await asyncio.sleep(0.01)


async def test_leaving_ends_whoever_still_waits_on_the_stream():
    bench = Bench()
    async with bench.replica.submit(request()) as stream:
        waiting = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(0)
    assert await waiting is None


async def test_a_request_that_failed_alone_says_so():
    bench = Bench()
    async with bench.replica.submit(request()) as stream:
        bench.engine.report(last_words(reason=FinishReason.ERROR))
        output = await anext(stream)
        assert output.finish_reason is FinishReason.ERROR
        assert output.error == "why"
    assert bench.engine.aborted == []


async def test_a_dead_engine_loses_its_requests_and_takes_no_more():
    bench = Bench()
    async with bench.replica.submit(request()) as stream:
        bench.engine.report(token(1))
        await asyncio.sleep(0.01)
        bench.engine.alive = False
        bench.engine.report(last_words(reason=FinishReason.ERROR))
        await asyncio.sleep(0.01)
        assert (await anext(stream)).token_ids == (1,)  # what came before counts
        with pytest.raises(ReplicaUnavailable):
            await anext(stream)
    with pytest.raises(ReplicaUnavailable):
        async with bench.replica.submit(request("s")):
            pass
    assert not bench.replica.stats().alive


async def test_a_full_replica_refuses_until_a_place_is_free():
    bench = Bench(max_open=1)
    async with bench.replica.submit(request("a")):
        with pytest.raises(ReplicaUnavailable):
            async with bench.replica.submit(request("b")):
                pass
    async with bench.replica.submit(request("b")):
        pass
    assert [r.request_id for r in bench.engine.submitted] == ["a", "b"]


async def test_draining_waits_for_the_running_and_refuses_the_new():
    bench = Bench()
    async with bench.replica.submit(request()) as stream:
        await bench.replica.drain(0.01)
        with pytest.raises(ReplicaUnavailable):
            async with bench.replica.submit(request("late")):
                pass
        drained = asyncio.create_task(bench.replica.drain(5))
        bench.engine.report(token(1, finish=FinishReason.LENGTH))
        await anext(stream)
        assert not drained.done()
    await asyncio.wait_for(drained, 1)


async def test_closing_cuts_streams_off():
    bench = Bench()
    async with bench.replica.submit(request()) as stream:
        await bench.replica.close()
        with pytest.raises(ReplicaUnavailable):
            await anext(stream)
    await bench.replica.close()
    assert bench.engine.closed == 2
    assert bench.engine.aborted == []


async def test_a_report_costs_the_loop_one_wake_up_and_little_time():
    bench = Bench(max_open=64)
    async with bench.replica.submit(request("r")):
        outputs = [token(1, f"r{i}") for i in range(64)]
        started = time.perf_counter()
        for _ in range(50):
            bench.engine.sink(StepReport(tuple(outputs), 0.01, 64, 64, bench.engine.stats()))
        await asyncio.sleep(0)
        assert len(bench.seen) == 50
        assert time.perf_counter() - started < 0.25
