"""One sequence's way through the replicas: what it leaves behind, whom it blames."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from time import monotonic

import pytest

from cache.breaker import BreakerState
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from gateway.dispatch.member import Condition, Health, Member
from gateway.dispatch.prefix import UNKNOWN
from gateway.dispatch.router import Router
from gateway.dispatch.run import MoveTerms, Run
from gateway.metrics import Metrics
from gateway.replica import ReplicaUnavailable
from tests.gateway.fakes import ScriptedReplica
from tests.gateway.stage import Observer, eventually, router_over

REQUEST = EngineRequest("r", [1, 2, 3], SamplingParams(max_tokens=50, temperature=0.0), None)
TERMS = MoveTerms(recovery_s=10.0)


class Mortal(ScriptedReplica):
    """Is down, or refuses requests, as a test says."""

    condition = Condition.SERVING
    refusal: ReplicaUnavailable | None = None

    def health(self) -> Health:
        return Health(self.condition)

    def submit(self, request):
        if self.refusal is None:
            return super().submit(request)
        return self._refusing(self.refusal)

    @asynccontextmanager
    async def _refusing(self, refusal):
        raise refusal
        yield


def routed(*replicas: ScriptedReplica) -> Router[ScriptedReplica]:
    return router_over("m", replicas, Observer(Metrics(["m"], [], b"secret")))


def make_run(router: Router[ScriptedReplica], terms: MoveTerms = TERMS) -> Run:
    return Run(router, REQUEST, UNKNOWN, terms)


def open_breaker(member: Member[ScriptedReplica], *, probe_due: bool) -> None:
    """As three losses in a row do, with the first probe due or not yet."""
    for _ in range(3):
        member.breaker.failure(monotonic() - (60.0 if probe_due else 0.0))
    assert not member.breaker.closed


async def read(run: Run) -> int:
    """Consume all outputs: the number of tokens."""
    return sum([len(output.token_ids) async for output in run])


async def test_a_run_that_is_left_while_it_looks_for_a_replica_takes_none() -> None:
    """As when a stop string ends a choice whose replica has just been lost."""
    lone = Mortal(name="m/0", dies_after=2)
    router = routed(lone)
    async with make_run(router) as run:
        reading = asyncio.create_task(read(run))
        await eventually(lambda: len(lone.requests) == 1)
        lone.condition = Condition.DOWN
        await eventually(lambda: run.receipts[0].lost is not None)
    lone.condition, lone.dies_after = Condition.SERVING, None
    router.changed()
    assert await asyncio.wait_for(reading, 5) == 2
    [member] = router.members
    assert (len(lone.requests), lone.open, member.load.sequences) == (1, 0, 0)


async def test_a_run_that_is_left_while_a_replica_takes_it_is_taken_back() -> None:
    class Slow(ScriptedReplica):
        taking = asyncio.Event()

        @asynccontextmanager
        async def submit(self, request):
            await self.taking.wait()
            async with super().submit(request) as outputs:
                yield outputs

    lost, slow = Mortal(name="m/0", dies_after=1), Slow(name="m/1")
    router = routed(lost, slow)
    router.members[1].draining = True
    async with make_run(router) as run:
        router.members[0].draining, router.members[1].draining = True, False
        reading = asyncio.create_task(read(run))
        await eventually(lambda: len(run.receipts) == 2)
        assert router.members[1].load.sequences == 1
    slow.taking.set()
    assert await asyncio.wait_for(reading, 5) == 1
    assert (slow.open, slow.aborted) == (0, ["r~1"])
    assert [member.load.sequences for member in router.members] == [0, 0]


@pytest.mark.parametrize(
    "refusal",
    [ReplicaUnavailable("full", full=True), ReplicaUnavailable("down", blames_replica=False)],
    ids=["full", "not to blame"],
)
async def test_a_probe_that_is_refused_without_blame_is_not_the_last(
    refusal: ReplicaUnavailable,
) -> None:
    lone = Mortal(name="m/0")
    lone.refusal = refusal
    router = routed(lone)
    [member] = router.members
    open_breaker(member, probe_due=True)
    with pytest.raises(ReplicaUnavailable):
        async with make_run(router, MoveTerms(moves=0)):
            pass
    assert member.breaker.state is BreakerState.OPEN
    assert member.breaker.wait_s(monotonic()) is not None


async def test_a_loss_counts_once_where_there_is_no_other_replica() -> None:
    lone = Mortal(name="m/0", dies_after=0)
    router = routed(lone)
    run = make_run(router, MoveTerms(moves=3, recovery_s=0.0))
    async with run:
        lone.condition = Condition.DOWN
        with pytest.raises(ReplicaUnavailable):
            await read(run)
    assert len(run.receipts) == 1
    assert router.members[0].breaker.closed


async def test_requests_wait_for_the_outcome_of_a_lone_replicas_probe() -> None:
    gate = asyncio.Event()
    lone = Mortal(name="m/0", gate=gate)
    router = routed(lone)
    [member] = router.members
    open_breaker(member, probe_due=True)

    async def answered() -> int:
        async with make_run(router) as run:
            return await read(run)

    tasks = [asyncio.create_task(answered()) for _ in range(4)]
    await eventually(lambda: member.breaker.state is BreakerState.PROBING)
    await asyncio.sleep(0)
    assert (len(lone.requests), any(task.done() for task in tasks)) == (1, False)
    gate.set()
    assert await asyncio.wait_for(asyncio.gather(*tasks), 5) == [len(lone.answer) + 1] * 4
    assert member.breaker.closed


async def test_nobody_waits_for_a_replica_that_is_down() -> None:
    lone = Mortal(name="m/0")
    lone.condition = Condition.DOWN
    with pytest.raises(ReplicaUnavailable) as refused:
        await asyncio.wait_for(make_run(routed(lone)).__aenter__(), 1)
    assert not refused.value.full
