"""`forebay usage` and `forebay ledger` against a running server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.cli import usage as cli_usage
from gateway.cli.ledger import Form
from gateway.cli.main import run
from gateway.ledger.export import FORMATS
from gateway.ledger.group_by import GroupBy
from gateway.ledger.row import LedgerRow
from tests.gateway.database.both import place
from tests.gateway.ledger.rows import row
from tests.gateway.ledger.stage import opened_pages, served
from tests.gateway.ledger.test_export import read_csv
from tests.gateway.stage import ADMIN


@dataclass(frozen=True)
class Running:
    """A server with the ledger's pages, on a thread of its own."""

    url: str
    note: Callable[[LedgerRow], None]


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    started, stop = threading.Event(), asyncio.Event()
    running: list[tuple[asyncio.AbstractEventLoop, Running]] = []

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        async with (
            opened_pages(place("sqlite", tmp_path, request)) as stage,
            served(stage.app) as port,
        ):

            def note(each: LedgerRow) -> None:
                loop.call_soon_threadsafe(stage.here.ledger.note, each)

            running.append((loop, Running(f"http://127.0.0.1:{port}", note)))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(10)
        yield running[0][1]
    finally:
        running[0][0].call_soon_threadsafe(stop.set)
        thread.join()


def test_the_command_offers_what_the_server_takes() -> None:
    assert [each.value for each in cli_usage.GroupBy] == [each.value for each in GroupBy]
    assert [each.value for each in Form] == list(FORMATS)


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_ADMIN_KEY", ADMIN)


def test_usage(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        server.note(row())
    server.note(row(tenant="beta", model="\x1b[31mred", met_slo=None, ttft_s=None, tpot_s=None))
    assert run(["usage", "--url", server.url]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    acme = ["acme", "m", "2", "200", "60%", "80", "0.000002000", "100.00%", "2.31e-05"]
    assert [*acme, "200.0", "200.0", "200.0", "10.0", "10.0"] in lines
    assert any(line[:2] == ["beta", "[31mred"] and line[-5:] == ["-"] * 5 for line in lines)
    assert any(line[:2] == ["all", "3"] for line in lines)
    assert "\x1b" not in out
    assert run(["usage", "--url", server.url, "--tenant", "acme", "--by", "day", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["data"][0]["requests"]["total"] == 2
    assert run(["usage", "--url", server.url, "--tenant", "acme", "--by", "day"]) == 0
    assert "00:00" in capsys.readouterr().out
    assert run(["usage", "--url", server.url, "--by", "color"]) == 2
    assert "Invalid value for '--by'" in capsys.readouterr().err
    assert run(["usage", "--url", server.url, "--key", "wrong-key-0123456789"]) == 1
    assert "FOREBAY_ADMIN_KEY" in capsys.readouterr().err
    assert run(["usage", "--url", server.url, "--start", "1", "--end", "2"]) == 0


def test_export(
    server: Running, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    rows = [row(), row(tenant="beta")]
    for each in rows:
        server.note(each)
    assert run(["ledger", "export", "--url", server.url]) == 0
    found = read_csv(capsysbinary.readouterr().out)
    assert [each["id"] for each in found] == [each.id for each in rows]
    file = tmp_path / "ledger.jsonl"
    command = ["ledger", "export", "--url", server.url, "--output", str(file)]
    assert run([*command, "--format", "jsonl", "--tenant", "beta"]) == 0
    assert json.loads(file.read_text())["id"] == rows[1].id
    assert run([*command, "--format", "xml"]) == 2
    assert b"Invalid value for '--format'" in capsysbinary.readouterr().err
    assert json.loads(file.read_text())["id"] == rows[1].id, "what was there stays"
    missing = tmp_path / "missing" / "ledger.csv"
    assert run(["ledger", "export", "--url", server.url, "--output", str(missing)]) == 1
    assert b"cannot be written" in capsysbinary.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.jsonl", "state"]
