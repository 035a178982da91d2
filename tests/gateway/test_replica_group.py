"""Replicas as the operator handles them, several hands at a time."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from time import monotonic

import pytest

from gateway.dispatch.member import Member
from gateway.dispatch.prefix import UNKNOWN
from gateway.dispatch.router import Router
from gateway.metrics import Metrics
from gateway.replica_group import ReplicaGroup
from policies.routing import RouteRequest
from tests.gateway.fakes import ScriptedReplica
from tests.gateway.stage import Observer, eventually, router_over

ASK = RouteRequest(prompt_tokens=10)


class Stage:
    """A group of one replica, m/0, whose closing takes until `closed` is set."""

    def __init__(self) -> None:
        observer = Observer(Metrics(["m"], [], b"secret"))
        self.router: Router[ScriptedReplica] = router_over("m", [], observer)
        self.group = ReplicaGroup(self.router)
        self.closing: list[str] = []
        self.closed = asyncio.Event()
        self.hold("m/0")

    def hold(self, name: str) -> AsyncExitStack:
        async def close() -> None:
            self.closing.append(name)
            await self.closed.wait()

        held = AsyncExitStack()
        held.push_async_callback(close)
        replica = ScriptedReplica(name=name)
        member = Member(
            replica,
            "in-process",
            max_running=1,
            capacity=None,
            block_tokens=16,
            clock=monotonic,
        )
        self.group.hold(member, held, tells_events=True)
        return held


async def test_two_who_retire_a_replica_both_wait_until_it_is_gone() -> None:
    stage = Stage()
    retiring = [asyncio.create_task(stage.group.retire("m/0", 1)) for _ in range(2)]
    await eventually(lambda: stage.closing == ["m/0"])
    assert not any(task.done() for task in retiring)
    stage.closed.set()
    await asyncio.gather(*retiring)
    assert stage.closing == ["m/0"]
    assert stage.router.members == ()
    await stage.group.retire("m/0", 1)


async def test_closing_the_group_waits_for_what_is_being_retired() -> None:
    stage = Stage()
    retiring = asyncio.create_task(stage.group.retire("m/0", 1))
    await eventually(lambda: stage.closing == ["m/0"])
    closing = asyncio.create_task(stage.group.close())
    retiring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await retiring
    assert not closing.done()
    stage.closed.set()
    await asyncio.wait_for(closing, 1)
    assert (stage.closing, stage.router.members) == (["m/0"], ())


async def test_what_a_closed_group_does_not_take_stays_with_who_opened_it() -> None:
    stage = Stage()
    stage.closed.set()
    await stage.group.close()
    with pytest.raises(ValueError, match="shutting down"):
        stage.hold("m/1")
    assert stage.router.members == ()


async def test_a_name_that_is_taken_stays_with_who_opened_it() -> None:
    stage = Stage()
    held = AsyncExitStack()
    held.callback(stage.closing.append, "the second")
    with pytest.raises(ValueError, match="is there already"):
        stage.group.hold(stage.router.members[0], held, tells_events=True)
    await held.aclose()
    assert stage.closing == ["the second"]


async def test_a_replica_that_is_resumed_while_it_is_retired_gets_nothing_once_it_ends() -> None:
    stage = Stage()
    [member] = stage.router.members
    with stage.router.place(ASK, UNKNOWN):
        retiring = asyncio.create_task(stage.group.retire("m/0", 0.02))
        await eventually(lambda: member.draining)
        member.draining = False
        await eventually(lambda: bool(stage.closing))
        assert not member.takes_requests()
    stage.closed.set()
    await retiring


async def test_who_retires_a_replica_spares_the_next_one_of_its_name() -> None:
    stage = Stage()
    stage.closed.set()
    with stage.router.place(ASK, UNKNOWN):
        slow = asyncio.create_task(stage.group.retire("m/0", 0.1))
        await asyncio.sleep(0)
        await stage.group.retire("m/0", 0)
        stage.hold("m/0")
        await slow
    assert [member.name for member in stage.router.members] == ["m/0"]
    assert stage.router.serves
