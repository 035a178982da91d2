"""`forebay tenants`, `keys` and `audit` against a running gateway."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from gateway.cli.main import run
from gateway.listening import listen
from tests.gateway.admin.office import open_office
from tests.gateway.database.both import Place
from tests.gateway.stage import ADMIN, CHAT, chat, eventually

Run = Callable[..., str]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway on a port, on a thread of its own."""
    place = Place("sqlite", {"FOREBAY_STATE_DIR": str(tmp_path_factory.mktemp("office") / "s")})
    started, stop = threading.Event(), asyncio.Event()
    [listener] = listen("127.0.0.1", 0)
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        async with open_office(place) as office:
            server = uvicorn.Server(
                uvicorn.Config(office.app, log_config=None, access_log=False, lifespan="off")
            )
            answering = asyncio.create_task(server._serve([listener]))
            await eventually(lambda: server.started)
            loops.append(asyncio.get_running_loop())
            started.set()
            await stop.wait()
            server.should_exit = server.force_exit = True
            await answering

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(10)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    loops[0].call_soon_threadsafe(stop.set)
    thread.join()


@pytest.fixture
def forebay(
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Runs a command and returns what it printed; `fails` is the exit code that is expected."""
    monkeypatch.setenv("FOREBAY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FOREBAY_ADMIN_KEY", ADMIN)

    def command(*words: str, fails: int = 0) -> str:
        capsys.readouterr()
        code = run([*words, "--url", url])
        written = capsys.readouterr()
        assert code == fails, written
        return written.err if fails else written.out

    return command


def last_json(output: str) -> Any:
    """The gateway of these tests logs to the same output."""
    return json.loads(output.splitlines()[-1])


def status_of(url: str, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(url + CHAT, json=chat(), headers=headers).status_code


def test_a_tenants_life(forebay: Run, url: str, tmp_path: Path) -> None:
    file = tmp_path / "tenant.yaml"
    file.write_text("class: interactive\nlimits: {rpm: 600, concurrency: 4}\n")
    made = forebay("tenants", "create", "life", "--file", str(file), "--set", "limits.rpm=900")
    assert "source: runtime" in made
    assert "limits.rpm: 900" in made
    assert "limits.concurrency: 4" in made
    assert "class: interactive" in made
    changed = forebay(
        "tenants", "update", "life", "--set", "limits.rpm=null", "--set", "slo={ttft_ms: 500}"
    )
    assert "limits.rpm" not in changed
    assert "slo.ttft_ms: 500\n" in changed
    assert "receipt: true\n" in changed
    shown = last_json(forebay("tenants", "show", "life", "--json"))
    assert (shown["id"], shown["limits"]["concurrency"]) == ("life", 4)
    listed = forebay("tenants", "list")
    assert [line.split()[:2] for line in listed.splitlines() if "runtime" in line] == [
        ["life", "runtime"]
    ]
    assert "concurrency 4" in listed
    assert "\x1b" not in listed
    forebay("keys", "issue", "life")
    gone = forebay("tenants", "delete", "life", "--yes")
    assert "keys revoked: 1\n" in gone
    assert "m: blocks removed: device 0, redis 0" in gone
    assert "404" in forebay("tenants", "show", "life", fails=1)
    assert "404" in forebay("tenants", "delete", "life", "--yes", fails=1)
    assert "keys revoked: 0" in forebay("tenants", "delete", "life", "--yes", "--unknown")


def test_a_keys_life(forebay: Run, url: str) -> None:
    issued = forebay(
        "keys", "issue", "acme", "--name", "ci", "--expires-in", "30d", "--set", "limits.rpm=60"
    )
    [plain] = [line.split()[1] for line in issued.splitlines() if line.startswith("key: ")]
    [key_id] = [line.split()[1] for line in issued.splitlines() if line.startswith("id: ")]
    assert "The key is not shown again." in issued
    assert status_of(url, plain) == 200

    new = last_json(forebay("keys", "rotate", key_id, "--grace", "2h", "--json"))
    assert new["replaces"] == key_id
    assert [status_of(url, key) for key in (plain, new["key"])] == [200, 200]
    again = forebay("keys", "rotate", key_id, fails=1)
    assert "409: This key was replaced before" in again

    listed = forebay("keys", "list", "--tenant", "acme")
    assert plain not in listed
    [row] = [line for line in listed.splitlines() if line.strip().startswith(key_id)]
    assert row.rstrip().endswith(new["id"])
    assert " ci " in row
    every = last_json(forebay("keys", "list", "--json"))["keys"]
    assert {each["source"] for each in every} == {"file", "runtime"}

    assert "expires: 2099-01-01 00:00:00Z" in forebay(
        "keys", "expire", new["id"], "--at", "2099-01-01T00:00:00Z"
    )
    assert "expires: never" in forebay("keys", "expire", new["id"], "--never")
    assert "state:   active" in forebay("keys", "expire", new["id"], "--in", "7d")
    assert "state:   revoked" in forebay("keys", "revoke", new["id"])
    assert status_of(url, new["key"]) == 401
    assert "404" in forebay("keys", "revoke", "key-nothing", fails=1)


def test_the_trail(forebay: Run) -> None:
    forebay("tenants", "create", "traced")
    forebay("tenants", "create", "traced", fails=1)
    rows = last_json(forebay("audit", "--target", "traced", "--json"))["entries"]
    assert [row["outcome"] for row in rows] == ["refused", "success"]
    page = forebay("audit", "--action", "tenant", "--limit", "1")
    assert "tenant.create" in page
    assert "127.0.0.1" in page
    [hint] = [line for line in page.splitlines() if "there are earlier ones" in line]
    assert f"--before {rows[0]['id']}" in hint
    assert "400: since must be Unix seconds" in forebay("audit", "--since", "then", fails=1)
    assert "traced" in forebay("audit", "--since", "2020-01-01", "--target", "traced")
    assert forebay("audit", "--until", "2020-01-01") == "none\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["tenants", "create", "x", "--set", "rpm"], 2, "--set: must be KEY=VALUE"),
        (["tenants", "create", "x", "--set", ".a=1"], 2, "--set: must be KEY=VALUE"),
        (["tenants", "create", "x", "--set", "a=[1"], 2, "--set: the value of a is no YAML"),
        (["tenants", "create", "x", "--set", "a=1", "--set", "a.b=1"], 2, "--set: a.b lies in"),
        (["tenants", "create", "x", "--set", "a=2020-01-01"], 2, "--set: a value is neither"),
        (["tenants", "create", "x", "--file", "/nothing"], 2, "/nothing: no such file"),
        (["tenants", "create", "x", "--set", "limits.rpm=0"], 1, "limits.rpm: must be at least 1"),
        (["tenants", "create", "a b"], 1, "the server answered 400: id: must be 1 to 64"),
        (["keys", "expire", "key-1"], 2, "give one of --in, --at and --never"),
        (["keys", "expire", "key-1", "--never", "--in", "1d"], 2, "give one of --in"),
        (["keys", "issue", "nobody"], 1, "404: There is no tenant of this id. (`forebay tenants"),
        (["keys", "revoke", "nothing"], 1, "404: There is no key of this id. (`forebay keys list`"),
        (["keys", "rotate", "../keys"], 1, "404"),
        (["tenants", "list", "--key", "wrong"], 1, "401: This is not the operator's key."),
    ],
)
def test_what_goes_wrong_is_one_line(
    forebay: Run, words: list[str], code: int, message: str
) -> None:
    error = forebay(*words, fails=code)
    assert error.startswith("forebay: ")
    assert message in error
    assert error.count("\n") == 1


def test_deleting_asks_first(forebay: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    forebay("tenants", "create", "asked")
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    assert "nothing was deleted\n" in forebay("tenants", "delete", "asked", fails=1)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "--yes does without\n" in forebay("tenants", "delete", "asked", fails=2)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    forebay("tenants", "delete", "asked", fails=130)
    assert "source: runtime" in forebay("tenants", "show", "asked")
