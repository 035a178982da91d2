"""Databases that are locked, stopped or frozen, and processes that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from gateway.ledger.table import LedgerUnavailable
from gateway.ledger.writer import WriterTerms
from tests.gateway.database.both import Place, place
from tests.gateway.ledger.rows import Opened, opened, row, stored
from tests.gateway.stage import eventually
from tests.postgres import Postgres

_NOTE_STEADILY = """
import asyncio, json, sys, time
from tests.gateway.database.both import Place
from tests.gateway.ledger.rows import opened, row
from gateway.ledger.writer import WriterTerms

async def main(url, environ):
    async with opened(Place(url, environ), terms=WriterTerms()) as here:
        number = 0
        while True:
            here.ledger.note(row(id=f"steady-{number:06d}"))
            print(json.dumps([number, time.time()]), flush=True)
            number += 1
            await asyncio.sleep(0.002)

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


def nothing() -> None:
    """Happens."""


async def noted_until_killed(
    where: Place, for_s: float, once_it_runs: Callable[[], object] = nothing
) -> tuple[list[float], float]:
    """Let another process note rows, then kill it: when each was noted, and when that was."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _NOTE_STEADILY, where.url, json.dumps(where.environ)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    lines = [await process.stdout.readline()]
    once_it_runs()
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline:
        lines.append(await process.stdout.readline())
    process.kill()
    killed_s = time.time()
    lines += (await process.stdout.read()).splitlines()
    await process.wait()
    assert process.returncode == -signal.SIGKILL
    return [json.loads(line)[1] for line in lines if line.endswith((b"\n", b"]"))], killed_s


async def assert_at_most_a_second_lost(where: Place, times: list[float], killed_s: float) -> None:
    """After another process has taken over what the dead one left."""
    spools = Path(where.environ["FOREBAY_STATE_DIR"], "ledger")
    async with opened(where) as here:
        await eventually(lambda: not files_in(spools), within_s=5)
        ids = [each.id for each in await here.stored() if each.id.startswith("steady")]
    assert ids == [f"steady-{number:06d}" for number in range(len(ids))], "a gap, or one twice"
    assert len(ids) > 0
    assert all(noted_s > killed_s - 1.0 for noted_s in times[len(ids) :])


def files_in(directory: Path) -> list[Path]:
    return list(directory.glob("*.jsonl"))


async def test_a_process_that_is_killed_loses_less_than_a_second(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    where = place("sqlite", tmp_path, request)
    async with where.open():
        pass
    await assert_at_most_a_second_lost(where, *await noted_until_killed(where, 0.5))


async def test_nor_while_the_database_is_locked(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    where = place("sqlite", tmp_path, request)
    async with where.open():
        pass
    with closing(sqlite3.connect(database_file(where), isolation_level=None)) as other:

        def lock() -> None:
            other.execute("BEGIN IMMEDIATE")

        times, killed_s = await noted_until_killed(where, 0.9, lock)
        assert files_in(Path(where.environ["FOREBAY_STATE_DIR"], "ledger"))
        other.execute("ROLLBACK")
    await assert_at_most_a_second_lost(where, times, killed_s)


def database_file(where: Place) -> Path:
    return Path(where.environ["FOREBAY_STATE_DIR"], "forebay.sqlite")


async def noted_while_away(here: Opened) -> list[str]:
    """Note rows while the database does not answer, and see them go into the file."""
    rows = [row() for _ in range(10)]
    before = here.ledger.stats()
    for each in rows[:5]:
        here.ledger.note(each)
    await eventually(lambda: here.ledger.stats().spooled >= before.spooled + 5)
    for each in rows[5:]:
        here.ledger.note(each)
    await eventually(lambda: here.ledger.stats().spooled >= before.spooled + 10)
    assert here.ledger.stats().lag_s > 0
    return [each.id for each in rows]


async def assert_all_there(here: Opened, ids: list[str]) -> None:
    await eventually(lambda: here.ledger.stats().spool_bytes == 0, within_s=15)
    assert await here.ledger.spent("acme", None, None, 0) == 1000 * len(ids)
    assert [each.id for each in await here.stored()] == ids
    assert here.ledger.stats().lost == 0


async def test_a_locked_database_and_back(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    where = place("sqlite", tmp_path, request)
    async with opened(where) as here:
        with closing(sqlite3.connect(database_file(where), isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            ids = await noted_while_away(here)
            other.execute("ROLLBACK")
        await assert_all_there(here, ids)


async def test_a_stopped_server_and_back(
    tmp_path: Path, request: pytest.FixtureRequest, postgres: Postgres
) -> None:
    async with opened(place("postgresql", tmp_path, request)) as here:
        here.ledger.note(first := row())
        assert await here.ledger.spent("acme", None, None, 0) == 1000
        await asyncio.to_thread(postgres.stop)
        try:
            ids = await noted_while_away(here)
            with pytest.raises(LedgerUnavailable):
                await here.ledger.spent("acme", None, None, 0)
        finally:
            postgres.start()
        await assert_all_there(here, [first.id, *ids])


async def test_a_lost_connection_is_replaced(
    tmp_path: Path, request: pytest.FixtureRequest, postgres: Postgres
) -> None:
    async with opened(place("postgresql", tmp_path, request)) as here:
        ids = []
        for _ in range(3):
            here.ledger.note(each := row())
            ids.append(each.id)
            postgres.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'forebay'"
            )
            await eventually(lambda: here.ledger.stats().waiting == 0)
        await assert_all_there(here, ids)


async def test_a_server_that_is_frozen_is_given_up_in_time(
    tmp_path: Path, request: pytest.FixtureRequest, postgres: Postgres
) -> None:
    where = place("postgresql", tmp_path, request)
    async with opened(where, terms=WriterTerms(interval_s=0.02)) as here:
        here.ledger.note(first := row())
        assert await here.ledger.spent("acme", None, None, 0) == 1000
        backends = postgres.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'forebay'"
        ).split()
        for backend in backends:
            os.kill(int(backend), signal.SIGSTOP)
        try:
            ids = await noted_while_away(here)
        finally:
            for backend in backends:
                os.kill(int(backend), signal.SIGCONT)
        await assert_all_there(here, [first.id, *ids])


async def test_closing_over_a_dead_server_leaves_the_rows_for_the_next_process(
    tmp_path: Path, request: pytest.FixtureRequest, postgres: Postgres
) -> None:
    where = place("postgresql", tmp_path, request)
    async with opened(where) as here:
        await asyncio.to_thread(postgres.stop)
        try:
            here.ledger.note(left := row())
            began = time.monotonic()
            await eventually(lambda: here.ledger.stats().spooled == 1)
        except BaseException:
            postgres.start()
            raise
    try:
        assert time.monotonic() - began < 8.0
    finally:
        postgres.start()
    async with opened(where) as here:
        await eventually(lambda: here.ledger.stats().written == 1)
        assert [each.id for each in await stored(here.database)] == [left.id]
