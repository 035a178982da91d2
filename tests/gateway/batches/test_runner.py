"""Who runs which line when, what becomes of it, and how batches end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import func, insert, select

from gateway.batches import batch_store
from gateway.batches.line_answer import LineAnswer
from gateway.batches.line_store import LEASE_S
from gateway.batches.progress import CANCEL_GRACE_S
from gateway.database.opening import Database
from gateway.database.schema import batch_lines, keys
from gateway.tenants import hash_key, key_id
from tests.gateway.batches.stage import (
    PATH,
    BatchStage,
    FakeLines,
    FakeTime,
    Mortal,
    answered,
    eventually,
    lines,
)
from tests.gateway.stage import K1, K2, tenant

DAY_S = 86_400


class Gate:
    """Lines wait here."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.began: list[str] = []

    async def __call__(self, name: str) -> LineAnswer:
        self.began.append(name)
        await self.open.wait()
        return answered(name)


def in_turn(*answers: LineAnswer | BaseException) -> Callable[[str], Awaitable[LineAnswer]]:
    """Each line gets these answers, one after another."""
    given: dict[str, int] = {}

    async def script(name: str) -> LineAnswer:
        given[name] = given.get(name, -1) + 1
        answer = answers[min(given[name], len(answers) - 1)]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return script


async def polls(database: Mortal) -> None:
    """Wait until a gateway has asked several times what there is to do."""
    asked = database.asked
    await eventually(lambda: database.asked > asked + 20)


@pytest.mark.parametrize(
    "first",
    [
        answered("overloaded", 503, 0.0),
        answered("limited", 429),
        answered("bad gateway", 502),
        answered("late", 504),
        TimeoutError(),
        ConnectionResetError(),
    ],
)
async def test_what_says_nothing_of_the_line_is_tried_again(sqlite: Database, first: Any):
    stage = BatchStage(sqlite)
    runner = FakeLines(in_turn(first, first, answered("well")))
    async with stage.gateway(runner):
        batch = await stage.until(await stage.begin(lines(2)), "completed")
        output, errors = await stage.results(batch)
    assert (len(output), errors) == (2, {})
    assert set(runner.began.values()) == {3}
    # by the same name each time, and none but once in the files
    assert all(len(ids) == 1 for ids in runner.line_ids.values())


@pytest.mark.parametrize(
    ("final", "status"),
    [
        (answered("wrong", 400), 400),
        (answered("ours", 500), 500),
        (ZeroDivisionError(), 500),
        (answered("request_exceeds_limit", 429), 429),
    ],
)
async def test_what_would_not_get_better_is_an_error(sqlite: Database, final: Any, status: int):
    stage = BatchStage(sqlite)
    runner = FakeLines(in_turn(final))
    async with stage.gateway(runner):
        batch = await stage.until(await stage.begin(lines(1)), "completed")
        _, errors = await stage.results(batch)
    assert errors["line-0"]["response"]["status_code"] == status
    assert "error" in errors["line-0"]["response"]["body"]
    assert batch["output_file_id"] is None
    assert runner.began["line-0"] == 1


async def test_so_many_lines_at_once_and_no_more(sqlite: Database):
    stage = BatchStage(sqlite, batch={"concurrency": 3})
    gate = Gate()
    runner = FakeLines(gate)
    async with stage.gateway(runner) as opened:
        batch_id = await stage.begin(lines(8))
        await eventually(lambda: runner.running == 3)
        assert opened.runner.running == 3
        gate.open.set()
        await stage.until(batch_id, "completed")
    assert runner.most_running == 3
    assert gate.began == [f"line-{number}" for number in range(8)]


async def test_tenants_share_the_places(sqlite: Database):
    stage = BatchStage(sqlite, batch={"concurrency": 4})
    gate = Gate()
    runner = FakeLines(gate)
    async with stage.gateway() as opened:
        await opened.runner.drain(1)
        many = await stage.begin(lines(8))
        few = await stage.begin(lines(8), K2)
    async with stage.gateway(runner):
        await stage.until(many, "in_progress")
        await stage.until(few, "in_progress", key=K2)
        await eventually(lambda: runner.running == 4)
        gate.open.set()
        await stage.until(many, "completed")
        await stage.until(few, "completed", key=K2)
    # whichever came first could take more only while the other had nothing to run
    first_half = Counter(each.tenant.id for each in runner.callers[:8])
    assert min(first_half["acme"], first_half["beta"]) >= 2


async def test_gateways_share_a_batch(database: Database):
    stage = BatchStage(database)
    gate = Gate()
    one, two = FakeLines(gate), FakeLines(gate)
    async with stage.gateway(one), stage.gateway(two):
        batch_id = await stage.begin(lines(40))
        await eventually(lambda: one.running == two.running == 4)
        gate.open.set()
        batch = await stage.until(batch_id, "completed")
        output, errors = await stage.results(batch)
    assert list(output) == [f"line-{number}" for number in range(40)]
    assert not errors
    assert set((one.began + two.began).values()) == {1}


async def test_a_killed_gateways_lines_run_elsewhere_after_its_lease(database: Database):
    clock = FakeTime()
    stage = BatchStage(database, clock=clock)
    gate, dead = Gate(), Mortal(database)
    async with stage.gateway(FakeLines(gate), dead):
        batch_id = await stage.begin(lines(3))
        await eventually(lambda: len(gate.began) == 3)
        dead.away = True
    runner, heir = FakeLines(), Mortal(database)
    async with stage.gateway(runner, heir):
        clock.now_s += LEASE_S - 1
        await polls(heir)
        assert not runner.began
        clock.now_s += 2
        batch = await stage.until(batch_id, "completed")
        output, _ = await stage.results(batch)
    assert len(output) == 3


async def test_who_lost_its_lease_stops_and_counts_no_more(sqlite: Database):
    clock = FakeTime()
    stage = BatchStage(sqlite, clock=clock)
    stuck, hung = Gate(), Mortal(sqlite)
    slow, quick = FakeLines(stuck), FakeLines()
    async with stage.gateway(slow, hung):
        batch_id = await stage.begin(lines(2))
        await eventually(lambda: len(stuck.began) == 2)
        hung.away = True
        clock.now_s += LEASE_S + 1
        async with stage.gateway(quick):
            batch = await stage.until(batch_id, "completed")
            hung.away = False
            await eventually(lambda: slow.running == 0)  # it hears that they are not its own
            output, _ = await stage.results(batch)
    assert len(output) == 2
    assert not slow.ended
    assert set(quick.ended.values()) == {1}


async def test_a_gateway_that_leaves_lets_lines_end_and_leaves_the_rest(sqlite: Database):
    stage = BatchStage(sqlite, batch={"concurrency": 2})
    gate = Gate()
    first = FakeLines(gate)
    async with stage.gateway(first) as opened:
        batch_id = await stage.begin(lines(6))
        await eventually(lambda: first.running == 2)
        draining = asyncio.create_task(opened.runner.drain(5))
        gate.open.set()
        assert await draining
        assert sum(first.ended.values()) == 2
        gate.open.clear()
        assert (await stage.batch_of(batch_id))["request_counts"]["completed"] == 2
    second = FakeLines(gate)
    async with stage.gateway(second) as opened:
        await eventually(lambda: second.running == 2)
        assert not await opened.runner.drain(0.01)  # their time is over
    assert not second.ended
    started = time.monotonic()
    third = FakeLines()
    async with stage.gateway(third):
        batch = await stage.until(batch_id, "completed")
        output, _ = await stage.results(batch)
    assert time.monotonic() - started < LEASE_S / 2
    assert len(output) == 6
    assert sum(third.ended.values()) == 4


async def test_an_answer_waits_for_the_database(sqlite: Database):
    stage = BatchStage(sqlite)
    mortal, gate = Mortal(sqlite), Gate()
    runner = FakeLines(gate)
    async with stage.gateway(runner, mortal):
        batch_id = await stage.begin(lines(1))
        await eventually(lambda: runner.running == 1)
        mortal.away = True
        gate.open.set()
        await eventually(lambda: runner.ended["line-0"] == 1)
        refused = mortal.refused
        await eventually(lambda: mortal.refused > refused + 4)
        mortal.away = False
        batch = await stage.until(batch_id, "completed")
        output, _ = await stage.results(batch)
    assert len(output) == 1
    assert runner.began["line-0"] == 1


async def test_what_is_cancelled_keeps_what_is_done(database: Database):
    stage = BatchStage(database, batch={"concurrency": 1})
    gate = Gate()
    gate.open.set()
    runner = FakeLines(gate)
    async with stage.gateway(runner):
        batch_id = await stage.begin(lines(5))
        await eventually(lambda: runner.ended["line-0"] == 1)
        gate.open.clear()
        await eventually(lambda: runner.running == 1)
        cancelling = await stage.post(f"/v1/batches/{batch_id}/cancel")
        assert cancelling["status"] == "cancelling"
        assert cancelling["cancelling_at"]
        assert (await stage.post(f"/v1/batches/{batch_id}/cancel"))["status"] == "cancelling"
        began = len(gate.began)
        gate.open.set()  # what runs may end
        batch = await stage.until(batch_id, "cancelled")
        output, errors = await stage.results(batch)
    assert len(gate.began) == began
    assert len(output) == began
    assert len(errors) == 5 - began
    for error in errors.values():
        assert error["response"] is None
        assert error["error"]["code"] == "batch_cancelled"
    assert batch["cancelled_at"] >= batch["cancelling_at"]


async def test_what_takes_too_long_to_end_is_cut_off(sqlite: Database):
    clock = FakeTime()
    stage = BatchStage(sqlite, clock=clock)
    runner = FakeLines(Gate())
    async with stage.gateway(runner):
        batch_id = await stage.begin(lines(2))
        await eventually(lambda: runner.running == 2)
        await stage.post(f"/v1/batches/{batch_id}/cancel")
        clock.now_s += CANCEL_GRACE_S + 1
        batch = await stage.until(batch_id, "cancelled")
        _, errors = await stage.results(batch)
        await eventually(lambda: runner.running == 0)
    assert len(errors) == 2


async def test_a_batch_can_be_cancelled_before_it_began(sqlite: Database):
    stage = BatchStage(sqlite)
    runner = FakeLines()
    async with stage.gateway(runner) as opened:
        await opened.runner.drain(1)
        batch_id = await stage.begin(lines(2))
        await stage.post(f"/v1/batches/{batch_id}/cancel")
    async with stage.gateway(runner):
        batch = await stage.until(batch_id, "cancelled")
        assert await stage.results(batch) == ({}, {})
    assert batch["request_counts"]["total"] == 0
    assert not runner.began


async def test_what_is_not_done_in_its_window_has_expired(database: Database):
    clock = FakeTime()
    stage = BatchStage(database, batch={"concurrency": 2}, clock=clock)
    stuck = asyncio.Event()

    async def first_only(name: str) -> LineAnswer:
        if name != "line-0":
            await stuck.wait()
        return answered(name)

    runner = FakeLines(first_only)
    async with stage.gateway(runner):
        batch_id = await stage.begin(lines(5))
        await eventually(lambda: runner.ended["line-0"] and runner.running == 2)
        clock.now_s += DAY_S
        batch = await stage.until(batch_id, "expired")
        output, errors = await stage.results(batch)
        await eventually(lambda: runner.running == 0)
    assert list(output) == ["line-0"]
    assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
    assert batch["expired_at"] >= batch["expires_at"]
    assert batch["completed_at"] is None


async def test_ended_batches_are_forgotten_with_their_files(sqlite: Database):
    clock = FakeTime()
    stage = BatchStage(sqlite, batch={"file_ttl": "2h"}, clock=clock)
    async with stage.gateway():
        batch_id = await stage.begin(lines(3))
        batch = await stage.until(batch_id, "completed")
    # what is in the files is not kept twice
    async with sqlite.read() as connection:
        kept = batch_lines.c.response.is_not(None) | (batch_lines.c.body != "")
        lines_kept = select(func.count()).select_from(batch_lines).where(kept)
        assert await connection.scalar(lines_kept) == 0
    clock.now_s += 7200
    async with stage.gateway() as opened:
        await opened.files.sweep()
        assert (await stage.get(f"/v1/files/{batch['output_file_id']}"))["error"]
    clock.now_s += 1
    async with stage.gateway():  # the first sweep is at its start
        assert (await stage.until(batch_id, None))["error"]["code"] == "batch_not_found"
    async with sqlite.read() as connection:
        assert await connection.scalar(select(func.count()).select_from(batch_lines)) == 0


async def test_a_batch_ends_with_its_key(database: Database):
    stage = BatchStage(database, batch={"concurrency": 1})
    gate = Gate()
    runner = FakeLines(gate)
    revoked = key_id(hash_key(K1))
    counted = Mortal(database)
    async with stage.gateway(runner, counted):
        batch_id = await stage.begin(lines(3))
        await eventually(lambda: runner.running == 1)
        # this gateway knows the key no more, but nothing says that it was revoked
        stage.use({K2: tenant("beta")})
        gate.open.set()
        await eventually(lambda: runner.running == 0)
        await polls(counted)
        stage.use({"another-key-of-acme": tenant("acme"), K2: tenant("beta")})
        batch = await stage.batch_of(batch_id, "another-key-of-acme")
        assert batch["status"] == "in_progress"
        async with database.begin() as connection:
            row = {"id": revoked, "tenant": "acme", "hash": "x", "created_s": 0.0}
            await connection.execute(insert(keys).values(**row, revoked_s=1.0, name="", limits=""))
        batch = await stage.until(batch_id, "cancelled", key="another-key-of-acme")
        output, errors = await stage.results(batch, "another-key-of-acme")
    assert list(output) == ["line-0"]
    assert len(errors) == 2


async def test_lines_run_as_whoever_made_the_batch_is_now(sqlite: Database):
    stage = BatchStage(sqlite, batch={"concurrency": 1})
    gate = Gate()
    runner = FakeLines(gate)
    async with stage.gateway(runner):
        batch_id = await stage.begin(lines(2))
        await eventually(lambda: runner.running == 1)
        stage.use({K1: tenant("acme", weight=7.0)})
        gate.open.set()
        await stage.until(batch_id, "completed")
    assert [each.tenant.weight for each in runner.callers] == [1.0, 7.0]


async def test_a_tenant_has_so_many_open_batches_and_no_more(
    sqlite: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch_store, "MOST_OPEN_BATCHES", 2)
    stage = BatchStage(sqlite)
    gate = Gate()
    async with stage.gateway(FakeLines(gate)):
        first, second = await stage.begin(lines(1)), await stage.begin(lines(1))
        body = {
            "input_file_id": await stage.upload(lines(1)),
            "endpoint": PATH,
            "completion_window": "24h",
        }
        refused = await stage.post("/v1/batches", body)
        assert refused["error"]["code"] == "batch_limit_exceeded"
        await stage.begin(lines(1), K2)
        gate.open.set()
        await stage.until(first, "completed")
        await stage.until(second, "completed")
        assert (await stage.post("/v1/batches", body))["status"] == "validating"
