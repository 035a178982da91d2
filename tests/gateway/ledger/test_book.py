"""The ledger on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from gateway.ended_tasks import end_task
from gateway.ledger.metrics import LedgerCollector
from gateway.ledger.opening import open_ledger
from gateway.ledger.retention import delete_old, keep_ageing
from gateway.ledger.table import LedgerTable, LedgerUnavailable, RowRefused, asked
from gateway.ledger.writer import WriterTerms
from gateway.state_dir import StateDir
from tests.gateway.database.both import KINDS, Place, place
from tests.gateway.ledger.rows import QUICK, opened, row, stored


@pytest.fixture(params=KINDS)
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place(request.param, tmp_path, request)


async def test_rows_are_stored_as_they_were_noted(anywhere: Place) -> None:
    rows = [
        row(),
        row(status=None, ttft_s=None, tpot_s=None, met_slo=None, streamed=True),
        row(kind="storage", token_hours=1.5, queue_s=0.25, publish_s=0.5, met_slo=False),
        row(replica="é" * 300, request_id="a\0b"),
    ]
    async with opened(anywhere) as here:
        for each in rows:
            here.ledger.note(each)
        assert await here.ledger.spent("acme", None, None, 0) == 4000
        assert await here.stored() == [
            *rows[:3],
            replace(rows[3], replica="é" * 256, request_id="ab"),
        ]


async def test_the_end_writes_what_is_left(anywhere: Place) -> None:
    async with opened(anywhere) as here:
        here.ledger.note(kept := row())
    async with anywhere.open() as database:
        assert await stored(database) == [kept]


async def test_each_id_is_written_once_whoever_writes_it(anywhere: Place, tmp_path: Path) -> None:
    rows = [row() for _ in range(300)]
    async with opened(anywhere) as one:
        other_state = StateDir.open({"FOREBAY_STATE_DIR": str(tmp_path / "other")})
        async with open_ledger(one.database, other_state, lambda: 1e9, terms=QUICK) as two:
            for each in rows:
                one.ledger.note(each)
                two.note(replace(each, cost_nusd=each.cost_nusd + 1))
            await two.spent("acme", None, None, 0)
            await one.ledger.spent("acme", None, None, 0)
        assert [each.id for each in await one.stored()] == [each.id for each in rows]


async def test_what_was_spent(anywhere: Place) -> None:
    rows = [
        row(finished_s=99.9, cost_nusd=1),
        row(finished_s=100.0, cost_nusd=10),
        row(finished_s=150.0, cost_nusd=100, key="key-2"),
        row(finished_s=150.0, cost_nusd=1000, model="large"),
        row(finished_s=150.0, cost_nusd=10_000, tenant="beta"),
        row(finished_s=160.0, cost_nusd=1 << 53, kind="storage", key=""),
    ]
    async with opened(anywhere) as here:
        for each in rows:
            here.ledger.note(each)
        spent = here.ledger.spent
        assert await spent("acme", None, None, 100.0) == 1110 + (1 << 53)
        assert await spent("acme", None, None, 0.0) == 1111 + (1 << 53)
        assert await spent("acme", "key-2", None, 100.0) == 100
        assert await spent("acme", None, "large", 100.0) == 1000
        assert await spent("acme", "key-1", "m", 100.0) == 10
        assert await spent("nobody", None, None, 0.0) == 0


async def test_old_rows_are_deleted_in_small_pieces(anywhere: Place) -> None:
    rows = [row(finished_s=float(second)) for second in range(20)]
    async with opened(anywhere) as here:
        for each in rows:
            here.ledger.note(each)
        await here.ledger.spent("acme", None, None, 0)
        table = LedgerTable(here.database)
        assert await table.delete_before(5.0, most=3) == 3
        assert await here.stored() == rows[3:]
        assert await delete_old(table, 15.0, rows_at_once=7) == 12
        assert await here.stored() == rows[15:]
        assert await delete_old(table, 15.0) == 0


class WatchedTable(LedgerTable):
    """Says when something was deleted."""

    deleted = asyncio.Event()

    async def delete_before(self, time_s: float, *, most: int) -> int:
        rows = await super().delete_before(time_s, most=most)
        if rows:
            self.deleted.set()
        return rows


async def test_ageing_goes_on_by_itself(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    now_s = time.time()
    async with opened(place("sqlite", tmp_path, request)) as here:
        here.ledger.note(row(finished_s=now_s - 100))
        here.ledger.note(young := row(finished_s=now_s))
        await here.ledger.spent("acme", None, None, 0)
        table = WatchedTable(here.database)
        ageing = asyncio.create_task(keep_ageing(table, lambda: 50.0, round_s=0.01))
        try:
            async with asyncio.timeout(5):
                await table.deleted.wait()
        finally:
            await end_task(ageing)
        assert await here.stored() == [young]


async def test_a_row_that_no_database_takes_is_alone_in_being_lost(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with opened(place("postgresql", tmp_path, request)) as here:
        table = LedgerTable(here.database)
        async with here.database.begin() as connection:
            await connection.exec_driver_sql(
                "ALTER TABLE requests ADD CHECK (output_tokens <> 666)"
            )
        rows = [row() for _ in range(7)]
        rows[4] = replace(rows[4], output_tokens=666)
        assert await table.insert(rows) == 1
        assert await here.stored() == rows[:4] + rows[5:]
        with pytest.raises(RowRefused):
            async with asked(here.database.begin(), within_s=5) as connection:
                await connection.exec_driver_sql("SELECT 1 / 0")
        with pytest.raises(LedgerUnavailable):
            async with asked(here.database.begin(), within_s=5) as connection:
                await connection.exec_driver_sql("SELECT * FROM nowhere")


async def test_metrics_say_how_the_writing_goes(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    collector = LedgerCollector()
    registry = CollectorRegistry()
    registry.register(collector)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"forebay_ledger_{name}", labels)

    assert value("rows_total", result="lost") == 0
    where = place("sqlite", tmp_path, request)
    state_dir = StateDir.open(where.environ)
    slow = WriterTerms(interval_s=30.0, most_rows=3)
    async with (
        where.open() as database,
        open_ledger(database, state_dir, lambda: 1e9, collector, terms=slow) as ledger,
    ):
        ledger.note(row(finished_s=1.0, kind="storage"))
        assert value("lag_seconds") < 1.0
        await ledger.spent("acme", None, None, 0)
        for _ in range(4):
            ledger.note(row(finished_s=time.time() - 100))
        assert value("lag_seconds") == pytest.approx(100, abs=5)
        assert value("waiting_rows") == 3
        assert value("spool_bytes") == 0
        assert value("rows_total", result="written") == 1
        assert value("rows_total", result="spooled") == 0
        assert value("rows_total", result="lost") == 1
    assert value("rows_total", result="written") == 4
    assert value("lag_seconds") == 0
