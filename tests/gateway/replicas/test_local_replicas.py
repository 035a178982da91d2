"""One model's engines as many as are wanted, around puppets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from engine.text_side import TextSide
from gateway.metrics import Metrics
from gateway.redis_services import RedisServices
from gateway.replicas import local as local_module
from gateway.replicas.context import LocalContext
from gateway.replicas.local import LocalReplicas
from gateway.replicas.worker.messages import CoreShare
from gateway.replicas.worker.work_order import WorkOrder
from gateway.settings import ModelSettings
from tests.gateway.fakes import ByteTokenizer
from tests.gateway.replicas.worker_stage import (
    PATIENCE_S,
    PUPPET,
    answer,
    child_pids,
    puppet_order,
    request,
)
from tests.gateway.stage import Observer, eventually, router_over

MODEL = ModelSettings(
    name="m", path="bundled", replicas={"kind": "process", "count": 2}, cache={"redis": False}
)
FIRST, SECOND = CoreShare((), 2), CoreShare((), 3)


class Orders:
    """What workers were ordered to be."""

    def __init__(self) -> None:
        self.given: list[tuple[int, CoreShare]] = []

    def make(self, **fields: Any) -> WorkOrder:
        self.given.append((fields["index"], fields["cores"]))
        return WorkOrder(**fields, program=PUPPET)


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Orders]:
    made = Orders()
    text = TextSide("m", ByteTokenizer(), None, frozenset())
    monkeypatch.setattr(local_module, "WorkOrder", made.make)
    monkeypatch.setattr(local_module, "load_text_side", lambda *_, **__: text)
    yield made
    assert child_pids() == []


def replicas(**variables: str) -> tuple[LocalReplicas, LocalContext]:
    metrics = Metrics(["m"], [], b"secret")
    router: Any = router_over("m", [], Observer(metrics))
    context = LocalContext(
        b"secret",
        RedisServices(None, None, None, None),  # type: ignore[arg-type] # nobody keeps names here
        router.directory,
        metrics,
        puppet_order(**variables).environ,
        deque([FIRST, SECOND]),
    )
    return LocalReplicas(MODEL, router, context), context


async def test_a_replacement_has_the_number_and_the_cores_of_the_one_before(
    orders: Orders,
) -> None:
    engines, context = replicas()
    try:
        async with asyncio.timeout(PATIENCE_S):
            await engines.open(lambda *_: None)
            await engines.group.retire("m/0", 1)
            assert list(context.core_shares) == [FIRST]
            assert await engines.add() == "m/0"
            members = engines.group.router.members
            with members[0].load.share(1, 1), members[1].load.share(1, 1):
                scaling = asyncio.create_task(engines.scale(0, 5))
                await eventually(lambda: all(member.draining for member in members))
            await scaling
    finally:
        await engines.close()
    assert orders.given == [(0, FIRST), (1, SECOND), (0, FIRST)]
    assert set(context.core_shares) == {FIRST, SECOND}
    with pytest.raises(ValueError, match="shutting down"):
        await engines.add()


async def test_closing_ends_what_is_just_being_started(orders: Orders) -> None:
    engines, context = replicas(PUPPET_LOADING="drags on")
    adding = asyncio.create_task(engines.add())
    await eventually(lambda: bool(child_pids()), PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        await engines.close()
        with pytest.raises(ValueError, match="shutting down"):
            await adding
    assert engines.group.router.members == ()
    assert list(context.core_shares) == [SECOND, FIRST]


async def test_what_workers_make_of_their_devices_is_told_as_long_as_they_are_there(
    orders: Orders,
) -> None:
    engines, context = replicas()
    used = context.metrics.utilization
    try:
        async with asyncio.timeout(PATIENCE_S):
            await engines.open(lambda *_: None)
            member = engines.group.router.find("m/1")
            assert member is not None
            await answer(member.replica, request("r", [1, 2, 3]))
            text = context.metrics.render()
            assert b'forebay_peak_flops{replica="m/0"} 4e+09' in text
            assert b'forebay_peak_memory_bytes_per_second{replica="m/1"} 1e+10' in text
            assert b'forebay_step_flops_total{kind="decode",replica="m/1"} 8e+06' in text
            assert used.of("m/1")["decode"] == pytest.approx((0.25, 0.5))
            assert used.of("m/1")["prefill"] is used.of("m/0")["decode"] is None
            await engines.group.retire("m/1", 1)
            assert b'"m/1"' not in context.metrics.render()
    finally:
        await engines.close()
    assert b"m/0" not in context.metrics.render()
