"""`loadtest bench`: tables and exit codes with a fake `forebay serve`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest import forebay_server
from loadtest.bench import campaign
from loadtest.cli.main import app

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


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, env={"FOREBAY_API_KEY": "", "COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_wrong_use_exits_with_2_and_names_the_word() -> None:
    code, output = invoke("bench", "engines")

    assert code == 2
    assert "engines: no such part" in output


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
