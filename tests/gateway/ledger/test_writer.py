"""Rows reach the database once and in order, whatever it does meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.ended_tasks import end_task
from gateway.ledger.row import LedgerRow
from gateway.ledger.row_text import to_lines
from gateway.ledger.spool import Portion, Spool, SpoolRoom
from gateway.ledger.table import LedgerUnavailable
from gateway.ledger.writer import LedgerWriter, WriterTerms
from tests.gateway.ledger.rows import QUICK, row
from tests.gateway.stage import eventually


@dataclass
class FakeTable:
    """Keeps ids in the order in which they came. `open` says whether it answers, `up` whether what
    it answers is not that it is away."""

    ids: dict[str, None] = field(default_factory=dict)
    calls: list[int] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    up: bool = True
    loses_answers: bool = False

    def __post_init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()

    async def insert(self, rows: Sequence[LedgerRow]) -> int:
        self.calls.append(len(rows))
        await self.open.wait()
        if not self.up:
            raise LedgerUnavailable("away")
        self.ids.update((each.id, None) for each in rows if each.id not in self.refused)
        if self.loses_answers:
            raise LedgerUnavailable("no answer in time")
        return sum(each.id in self.refused for each in rows)


@asynccontextmanager
async def running(
    table: FakeTable,
    directory: Path,
    *,
    terms: WriterTerms = QUICK,
    most_bytes: int = 1 << 20,
    close_within_s: float = 1.0,
) -> AsyncIterator[LedgerWriter]:
    writer = LedgerWriter(table, SpoolRoom(directory, most_bytes=most_bytes), terms)
    task = asyncio.create_task(writer.run())
    try:
        yield writer
    finally:
        await end_task(task)
        await writer.close(close_within_s)


def noted(writer: LedgerWriter, count: int) -> list[str]:
    rows = [row() for _ in range(count)]
    for each in rows:
        writer.note(each)
    return [each.id for each in rows]


def files_in(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def test_rows_are_gathered_and_written(tmp_path: Path) -> None:
    table = FakeTable()
    async with running(table, tmp_path) as writer:
        ids = noted(writer, 5)
        assert writer.stats().waiting == 5
        assert await writer.caught_up(1.0)
        assert list(table.ids) == ids
        assert table.calls == [5]
        stats = writer.stats()
        assert (stats.written, stats.spooled, stats.lost) == (5, 0, 0)
        assert (stats.waiting, stats.lag_s) == (0, 0.0)
    assert files_in(tmp_path) == []


async def test_many_rows_are_written_in_portions_without_a_pause(tmp_path: Path) -> None:
    table = FakeTable()
    async with running(table, tmp_path, terms=WriterTerms(interval_s=30.0)) as writer:
        await asyncio.sleep(0)
        ids = noted(writer, 1200)
        assert await writer.caught_up(2.0)
    assert list(table.ids) == ids
    assert max(table.calls) == 500


async def test_what_is_not_written_yet_is_written_at_the_end(tmp_path: Path) -> None:
    table = FakeTable()
    async with running(table, tmp_path, terms=WriterTerms(interval_s=30.0)) as writer:
        ids = noted(writer, 3)
    assert list(table.ids) == ids
    assert files_in(tmp_path) == []
    noted(writer, 2)
    assert (writer.stats().lost, writer.stats().waiting) == (2, 0)


async def test_a_database_that_is_away_gets_the_rows_in_order_when_it_is_back(
    tmp_path: Path,
) -> None:
    table = FakeTable(up=False)
    async with running(table, tmp_path) as writer:
        ids = noted(writer, 3)
        await eventually(lambda: writer.stats().spool_bytes > 0)
        assert not await writer.caught_up(5.0), "it does not wait for what is known to be away"
        ids += noted(writer, 4)
        await eventually(lambda: writer.stats().spooled == 7)
        assert writer.stats().lag_s > 0
        assert not table.ids
        table.up = True
        await eventually(lambda: len(table.ids) == 7)
        ids += noted(writer, 2)
        assert await writer.caught_up(5.0)
        assert list(table.ids) == ids
        assert writer.stats().spool_bytes == 0
        assert writer.stats().lag_s == 0.0
    assert files_in(tmp_path) == []


async def test_a_slow_write_does_not_keep_rows_in_memory_alone(tmp_path: Path) -> None:
    table = FakeTable()
    table.open.clear()
    async with running(table, tmp_path) as writer:
        ids = noted(writer, 2)
        await eventually(lambda: bool(table.calls))
        ids += noted(writer, 3)
        await eventually(lambda: writer.stats().spooled == 5)
        assert writer.stats().waiting == 0
        table.open.set()
        assert await writer.caught_up(5.0)
    assert list(table.ids) == ids


async def test_what_a_dead_process_left_is_taken_over_by_one_that_runs(tmp_path: Path) -> None:
    away = FakeTable(up=False)
    async with running(away, tmp_path) as writer:
        left = noted(writer, 600)
    assert len(files_in(tmp_path)) == 1
    table, other = FakeTable(), FakeTable()
    async with running(table, tmp_path) as one, running(other, tmp_path) as two:
        more = noted(one, 1)
        await eventually(lambda: not files_in(tmp_path))
        assert await one.caught_up(1.0)
        assert await two.caught_up(1.0)
    assert {*table.ids, *other.ids} == {*left, *more}
    assert set(table.ids) in ({*left, *more}, set(more)), "one of them replays all of it"


async def test_a_file_that_cannot_be_read_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, broken = Spool.read, tmp_path / "broken.jsonl"

    def read(spool: Spool, most_rows: int) -> Portion:
        if spool.path == broken:
            raise OSError(errno.EIO, "Input/output error")
        return real(spool, most_rows)

    monkeypatch.setattr(Spool, "read", read)
    monkeypatch.setattr("gateway.ledger.writer._BROKEN_FILE_S", 0.01)
    for path, age in ((broken, 10), (tmp_path / "whole.jsonl", 5)):
        path.write_bytes(to_lines([row(id=path.stem)]))
        os.utime(path, (1e9 - age, 1e9 - age))
    table = FakeTable()
    async with running(table, tmp_path):
        await eventually(lambda: files_in(tmp_path) == [broken])
    assert list(table.ids) == ["whole"]
    assert files_in(tmp_path) == [broken]


async def test_a_process_that_lives_keeps_its_file(tmp_path: Path) -> None:
    away, table = FakeTable(up=False), FakeTable()
    async with running(away, tmp_path) as writer:
        ids = noted(writer, 3)
        await eventually(lambda: writer.stats().spooled == 3)
        async with running(table, tmp_path) as other:
            noted(other, 1)
            assert await other.caught_up(1.0)
        assert not set(ids) & set(table.ids)
        away.up = True
        assert len(files_in(tmp_path)) == 1


async def test_an_answer_that_is_lost_loses_and_doubles_nothing(tmp_path: Path) -> None:
    table = FakeTable(loses_answers=True)
    async with running(table, tmp_path) as writer:
        ids = noted(writer, 3)
        await eventually(lambda: writer.stats().spooled == 3)
        table.loses_answers = False
        await eventually(lambda: writer.stats().spool_bytes == 0)
        assert await writer.caught_up(1.0)
    assert list(table.ids) == ids
    assert writer.stats().written == 3


async def test_without_a_disk_rows_wait_in_memory_up_to_a_bound(tmp_path: Path) -> None:
    table = FakeTable(up=False)
    missing = tmp_path / "missing"
    terms = WriterTerms(interval_s=0.02, most_rows=10)
    async with running(table, missing, terms=terms) as writer:
        ids = noted(writer, 12)
        assert writer.stats().lost == 2
        await eventually(lambda: len(table.calls) > 1)
        assert writer.stats().waiting == 10
        table.up = True
        await eventually(lambda: len(table.ids) == 10)
    assert list(table.ids) == ids[:10]
    assert writer.stats().lost == 2


async def test_a_full_file_is_a_bound_too(tmp_path: Path) -> None:
    table = FakeTable(up=False)
    terms = WriterTerms(interval_s=0.02, most_rows=5)
    async with running(table, tmp_path, terms=terms, most_bytes=4000, close_within_s=0.1) as writer:
        ids = noted(writer, 5)
        await eventually(lambda: writer.stats().spooled == 5)
        ids += noted(writer, 5)
        ids += noted(writer, 5)
        await eventually(lambda: len(table.calls) > 1)
        assert writer.stats().lost == 5
        assert writer.stats().waiting == 5
        assert writer.stats().spool_bytes <= 4000
        table.up = True
        await eventually(lambda: len(table.ids) == 10)
    assert list(table.ids) == ids[:10]


async def test_what_neither_disk_nor_database_took_is_counted(tmp_path: Path) -> None:
    table = FakeTable(up=False)
    async with running(table, tmp_path / "missing") as writer:
        noted(writer, 4)
    assert writer.stats().lost == 4
    assert writer.stats().waiting == 0


async def test_a_row_that_the_database_refuses_holds_nobody_up(tmp_path: Path) -> None:
    table = FakeTable()
    bad = row()
    table.refused.add(bad.id)
    async with running(table, tmp_path) as writer:
        writer.note(bad)
        ids = noted(writer, 2)
        assert await writer.caught_up(1.0)
    assert list(table.ids) == ids
    assert (writer.stats().written, writer.stats().lost) == (2, 1)


async def test_a_failure_that_nobody_foresaw_does_not_end_the_writing(tmp_path: Path) -> None:
    table = FakeTable()
    failures = [ZeroDivisionError()]

    class Failing(FakeTable):
        async def insert(self, rows: Sequence[LedgerRow]) -> int:
            if failures:
                raise failures.pop()
            return await table.insert(rows)

    async with running(Failing(), tmp_path) as writer:
        ids = noted(writer, 2)
        assert await writer.caught_up(2.0)
    assert list(table.ids) == ids


async def test_caught_up_gives_up_in_time(tmp_path: Path) -> None:
    table = FakeTable()
    table.open.clear()
    async with running(table, tmp_path) as writer:
        noted(writer, 1)
        began = time.monotonic()
        assert not await writer.caught_up(0.05)
        assert time.monotonic() - began < 1.0
        table.open.set()


async def test_noting_costs_the_event_loop_a_few_microseconds(tmp_path: Path) -> None:
    rows = [row() for _ in range(2000)]
    async with running(FakeTable(), tmp_path) as writer:
        began = time.thread_time()
        for each in rows:
            writer.note(each)
        assert (time.thread_time() - began) / len(rows) < 20e-6


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.sampled_from(["note", "away", "back", "stall", "go", "turn", "lose", "answer", "die"]),
        max_size=25,
    )
)
def test_whatever_happens_each_row_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, events: list[str]
) -> None:
    """A database that comes, goes, stalls and loses answers, and writers that are abandoned."""

    async def play() -> None:
        directory = tmp_path_factory.mktemp("spool")
        table, ids = FakeTable(), []
        quick = WriterTerms(interval_s=0.001)

        async def one_life(rest: list[str]) -> list[str]:
            async with running(table, directory, terms=quick, close_within_s=0.01) as writer:
                while rest:
                    match rest.pop(0):
                        case "note":
                            ids.extend(noted(writer, 3))
                        case "away":
                            table.up = False
                        case "back":
                            table.up = True
                        case "stall":
                            table.open.clear()
                        case "go":
                            table.open.set()
                        case "lose":
                            table.loses_answers = True
                        case "answer":
                            table.loses_answers = False
                        case "turn":
                            await asyncio.sleep(0.004)
                        case _:
                            return rest
            return rest

        rest = list(events)
        while rest:
            rest = await one_life(rest)
        table.up, table.loses_answers = True, False
        table.open.set()
        async with running(table, directory, terms=quick) as writer:
            await eventually(lambda: not files_in(directory))
            assert await writer.caught_up(2.0)
            assert writer.stats().lost == 0
        assert sorted(table.ids) == sorted(ids)

    asyncio.run(play())
