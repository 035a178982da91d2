"""The command: tables and exit codes against a fake server, and a fake `forebay serve`."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from loadtest import forebay_server
from loadtest.bench import campaign
from loadtest.cli.main import app
from tests.loadtest.fake_server import Behaviour, Call, FakeServer, Reply, answer_well, fake_server

_FAKE_FOREBAY = """\
#!{python}
import json, os, pathlib, signal, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def answer(self, status, body, **headers):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        lag = 'forebay_event_loop_lag_seconds_bucket{{le="+Inf"}} 1.0'
        self.answer(200, lag.encode() if self.path == "/metrics" else b"ok")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != "Bearer " + os.environ["FOREBAY_LOADTEST_KEY"]:
            return self.answer(401, b"no")
        if not body["stream"]:
            return self.answer(200, b"{{}}", x_forebay_engine_ms="0.5")
        token = {{"choices": [{{"text": "x", "finish_reason": "length"}}]}}
        usage = {{"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}}
        events = [json.dumps(token), json.dumps({{"choices": [], "usage": usage}}), "[DONE]"]
        self.answer(200, "".join(f"data: {{one}}\\n\\n" for one in events).encode())

def stop(*args):
    pathlib.Path("{marks}", "stopped").touch()
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
arguments = dict(zip(sys.argv[2::2], sys.argv[3::2]))
pathlib.Path("{marks}", "config").write_text(pathlib.Path(arguments["--config"]).read_text())
if "{fails}":
    sys.exit("forebay.yaml: models[0]: no such model")
ThreadingHTTPServer(("127.0.0.1", int(arguments["--port"])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def _without_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake servers need none between measurements."""
    monkeypatch.setattr(campaign, "_REST_S", 0.0)


@contextmanager
def served(behave: Behaviour) -> Iterator[FakeServer]:
    """A fake server on a loop of its own: the command runs its own in this thread."""
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    found: list[FakeServer] = []

    async def serve() -> None:
        async with fake_server(behave) as server:
            found.append(server)
            ready.set()
            await stop.wait()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(5)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(5)


def url(server: FakeServer) -> str:
    return f"http://127.0.0.1:{server.endpoint.port}/v1"


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, env={"FOREBAY_API_KEY": "", "COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_run_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with served(answer_well) as one, served(answer_well) as other:
        code, output = invoke(
            *("run", "--url", url(one), "--model", "m", "--key", "sk-1", "--name", "ours"),
            *("--workloads", "w4", "--repeats", "2", "--json", str(out), "--markdown"),
            *("--against", url(other), "--against-name", "theirs"),
        )

    assert code == 0
    assert "| cell | ours (range) | theirs (range) | lead over theirs |" in output
    assert "theirs: all 12 requests answered whole" in output
    assert [one["cell"] for one in orjson.loads(out.read_bytes())["leads"]] == [
        "W4 TTFT cold",
        "W4 TTFT hit",
    ]
    assert {call.headers["authorization"] for call in one.calls} == {"Bearer sk-1"}
    assert {call.headers.get("authorization") for call in other.calls} == {None}


def test_failed_requests_are_counted_and_exit_with_1() -> None:
    async def failing_after_the_warm_up(call: Call, reply: Reply) -> None:
        if len(call.body["prompt"]) < 1024:
            await answer_well(call, reply)
        else:
            await reply.whole(503, b'{"error": {"message": "Overloaded."}}')

    with served(failing_after_the_warm_up) as server:
        code, output = invoke(
            "run", "--url", url(server), "--model", "m", "--workloads", "W4", "--repeats", "1"
        )

    assert code == 1
    assert "server: 6 of 6 requests FAILED\nW4: status 503: Overloaded." in output


def test_a_server_that_is_not_there_is_one_line() -> None:
    code, output = invoke("run", "--url", "http://127.0.0.1:1/v1", "--model", "m", "--seed", "1")

    assert code == 1
    assert output.splitlines()[-1].startswith("loadtest: server: 127.0.0.1:1: cannot connect")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--url", "nowhere", "--model", "m"), "nowhere: must look like"),
        (("run", "--url", "http://h/v1", "--model", "m", "--workloads", "W7"), "W7: no such"),
        (("bench", "engines"), "engines: no such part"),
    ],
)
def test_wrong_use_exits_with_2_and_names_the_word(arguments: tuple[str, ...], said: str) -> None:
    code, output = invoke(*arguments)

    assert code == 2
    assert said in output


def fake_forebay(directory: Path, *, fails: bool = False) -> Path:
    program = directory / "forebay"
    text = _FAKE_FOREBAY.format(python=sys.executable, marks=directory, fails="y" if fails else "")
    program.write_text(text)
    program.chmod(0o755)
    return program


def test_bench_starts_forebay_measures_it_and_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake_forebay(tmp_path)
    monkeypatch.setattr(forebay_server, "_forebay_command", lambda: str(program))
    code, output = invoke("bench", "gateway", "W4", "--repeats", "1")

    assert code == 0, output
    assert "added by the gateway ms" in output
    assert "W4 TTFT hit ms" in output
    assert "W1" not in output
    assert (tmp_path / "stopped").exists()
    assert "path: bundled" in (tmp_path / "config").read_text()


def test_a_forebay_that_does_not_start_is_shown_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake_forebay(tmp_path, fails=True)
    monkeypatch.setattr(forebay_server, "_forebay_command", lambda: str(program))
    code, output = invoke("bench")

    assert code == 1
    assert "forebay serve ended with code 1" in output
    assert "models[0]: no such model" in output


def test_a_missing_command_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    code, output = invoke("bench")

    assert code == 1
    assert "forebay: no such command" in output.splitlines()[-1]
