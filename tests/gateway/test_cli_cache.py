"""`forebay cache` against a running gateway."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from gateway.cli.main import run
from gateway.state_dir import StateDir
from tests.gateway.stage import ADMIN, COMPLETIONS, K1, Stage, prompt

LONG = "a prompt that is longer than two blocks of sixteen tokens"


@dataclass
class Running:
    """A gateway on a port, on a thread of its own."""

    url: str
    stage: Stage

    def ask(self, request_id: str) -> None:
        headers = {"authorization": f"Bearer {K1}", "x-request-id": request_id}
        response = httpx.post(self.url + COMPLETIONS, json=prompt(LONG), headers=headers)
        assert response.status_code == 200


@pytest.fixture
def gateway() -> Iterator[Running]:
    stage, started, stop = Stage(), threading.Event(), asyncio.Event()
    ports: list[int] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        async with stage.served() as port:
            loops.append(asyncio.get_running_loop())
            ports.append(port)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(10)
    yield Running(f"http://127.0.0.1:{ports[0]}", stage)
    loops[0].call_soon_threadsafe(stop.set)
    thread.join()


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FOREBAY_ADMIN_KEY", ADMIN)


def test_stats_name_the_models_that_run_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = httpx.Response(200, json={"models": {}, "not_covered": ["far"]})
    monkeypatch.setattr("gateway.cli.cache.raw", lambda *_, **__: answer)
    assert run(["cache", "stats"]) == 0
    assert capsys.readouterr().out.startswith("far: runs on servers elsewhere")


def test_stats(gateway: Running, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.ask("a")
    gateway.ask("b")
    gateway.stage.replica.redis_answers = False
    assert run(["cache", "stats", "--url", gateway.url + "/v1/"]) == 0
    out = capsys.readouterr().out
    assert "m (fake/0)" in out
    assert "redis (down)" in out
    assert [line.split() for line in out.splitlines()].count(["never_seen", "3", "0"]) == 2
    assert "acme" in out
    assert "\x1b" not in out
    assert run(["cache", "stats", "--url", gateway.url, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["models"]["m"]["replicas"][0]["tiers"][0]["hits"] == 3


def test_explain(gateway: Running, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.ask("a")
    gateway.ask("b")
    gateway.ask("b")
    assert run(["cache", "explain", "b", "--url", gateway.url]) == 0
    out = capsys.readouterr().out
    assert out.count("completions on fake/0 (m) for acme, ended") == 2
    assert f"48 of {len(LONG)} prompt tokens cached (48 device)" in out
    assert "hit, was on the device" in out
    assert run(["cache", "explain", "a", "--url", gateway.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["request_id"] == "a"
    assert run(["cache", "explain", "../cache", "--url", gateway.url]) == 1
    assert "404: No request of this id is among the last" in capsys.readouterr().err


def test_flush_and_erase(gateway: Running, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.ask("a")
    assert run(["cache", "erase", "acme", "--url", gateway.url]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "m: blocks removed: device 3, redis 0" in out
    gateway.ask("b")
    assert run(["cache", "flush", "--model", "m", "--url", gateway.url]) == 0
    assert "m: blocks removed: device 3, redis 0\n" in capsys.readouterr().out
    assert run(["cache", "flush", "--model", "nope", "--url", gateway.url]) == 1
    assert run(["cache", "erase", "gone", "--url", gateway.url]) == 1
    assert "404: No tenant of this id" in capsys.readouterr().err
    assert run(["cache", "erase", "gone", "--unknown", "--url", gateway.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tenant"] == "gone"
    assert run(["cache", "erase", "a/b", "--url", gateway.url]) == 2
    assert capsys.readouterr().err.startswith("forebay: TENANT: must be 1 to 64")
    assert run(["cache", "erase", "acme", "--user", "ann", "--url", gateway.url]) == 1
    assert "409" in capsys.readouterr().err


def test_a_removal_that_was_not_complete_fails_and_shows_what_was_done(
    gateway: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.ask("a")
    gateway.stage.replica.redis_answers = False
    assert run(["cache", "erase", "acme", "--url", gateway.url]) == 1
    written = capsys.readouterr()
    assert "device 3, redis not reached" in written.out
    assert written.err.startswith("forebay: the server answered 503: Not everything could be")
    assert written.err.count("\n") == 1


def test_the_key(
    gateway: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREBAY_ADMIN_KEY", "wrong")
    assert run(["cache", "stats", "--url", gateway.url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("forebay: the server answered 401: This is not the operator's key.")
    assert "FOREBAY_ADMIN_KEY" in error
    assert run(["cache", "stats", "--url", gateway.url, "--key", ADMIN]) == 0
    monkeypatch.delenv("FOREBAY_ADMIN_KEY")
    capsys.readouterr()
    assert run(["cache", "stats", "--url", gateway.url]) == 2
    assert capsys.readouterr().err == (
        "forebay: no operator's key: give --key or set FOREBAY_ADMIN_KEY\n"
    )


def test_this_machines_own_key_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FOREBAY_ADMIN_KEY")
    StateDir.open({"FOREBAY_STATE_DIR": str(tmp_path / "state")}).admin_key()
    assert run(["cache", "stats", "--url", "http://127.0.0.1:1"]) == 1  # got past the key
    assert capsys.readouterr().err == (
        "forebay: no server answers at http://127.0.0.1:1; is `forebay serve` running?\n"
    )


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}"])
def test_another_server_at_the_address(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{listening.server_port}"
        assert run(["cache", "stats", "--url", url]) == 1
        listening.shutdown()
        thread.join()
    assert capsys.readouterr().err == (
        f"forebay: what answers at {url}/admin/cache is not forebay\n"
    )


def test_models_that_run_elsewhere_are_named(
    gateway: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gateway.stage.models, "remote_names", lambda: ["far"])
    assert run(["cache", "erase", "acme", "--url", gateway.url]) == 0
    assert "far: not covered: it runs on servers that were not asked\n" in capsys.readouterr().out
