"""The command line: what it prints, and errors of one line with documented exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.main import run
from gateway.cli.server_call import printable
from gateway.state_dir import StateDir
from gateway.tenants import hash_key
from gateway.version import __version__

CONFIG = f"""
models: [{{name: tiny, path: bundled}}]
tenants: [{{id: acme, keys: [{{hash: "{hash_key("key")}"}}], limits: {{concurrency: 4}}}}]
"""


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("FOREBAY_API_KEY", raising=False)


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"forebay {__version__}\n"


def test_nothing_asked_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    help_text = capsys.readouterr().out
    assert all(command in help_text for command in ("serve", "chat", "keys", "check"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "No such command 'nope'."),
        (["serve", "--nope"], "No such option: --nope"),
        (["serve", "--port", "1e3"], "--port: must be a whole number"),
        (["serve", "--port", ""], "--port: must be a whole number"),
        (["serve", "--log-level", "loud"], "--log-level: must be one of"),
        (["serve", "--model", "/nothing.gguf"], "--model: no such file or directory: /nothing"),
        (["serve", "--config", "/nothing.yaml"], "/nothing.yaml: no such file"),
        (["check", "/nothing.yaml"], "/nothing.yaml: no such file"),
        (["check"], "Missing argument 'CONFIG'."),
        (["keys"], "Missing command."),
        (["chat"], "no key: give --key or set FOREBAY_API_KEY"),
        (["chat", "--key", "k", "--url", "here"], "--url: must begin with http:// or https://"),
        (["chat", "--max-tokens", "0"], "Invalid value for '--max-tokens'"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(arguments) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith(f"forebay: {message}")
    assert written.err.count("\n") == 1


def test_check_says_what_a_file_amounts_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "forebay.yaml"
    path.write_text(CONFIG)
    assert run(["check", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: valid",
        "listens on http://127.0.0.1:8000, metrics: local",
        "redis embedded",
        "model tiny: bundled, 1 replica(s) in-process, device auto, dtype auto, context 2048, "
        "batch 16, "
        "KV on device, DRAM, Redis",
        "tenant acme: 1 key(s), models *, standard, weight 1, limits 4 at once, nothing promised, "
        "cache tenant",
    ]


def test_check_counts_on_no_embedded_redis_that_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.embedded_redis.find_program", lambda: None)
    path = tmp_path / "forebay.yaml"
    path.write_text(CONFIG)
    assert run(["check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "\nno embedded Redis on this machine, it will be done without: " in out
    assert "KV on device, DRAM\n" in out
    path.write_text(CONFIG + "redis: {url: off}\n")
    assert run(["check", str(path)]) == 0
    assert "embedded" not in capsys.readouterr().out


def test_check_says_that_nobody_is_let_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "forebay.yaml"
    path.write_text("models: [{name: tiny, path: bundled}]\nserver: {admin_key_env: MY_ADMIN}\n")
    assert run(["check", str(path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no tenants: only those that `forebay tenants create` makes are let in")
    assert "MY_ADMIN" in last


def test_check_says_all_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "forebay.yaml"
    path.write_text(CONFIG + "server: {prot: 1}\ndatabase: {url: mysql}\n")
    assert run(["check", str(path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"forebay: {path}: server.prot: unknown key; did you mean port?",
        f"forebay: {path}: database.url: must be sqlite or a URL that begins with postgresql://",
    ]


def test_a_created_key_is_what_its_hash_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keys", "create", "--tenant", "acme"]) == 0
    out = capsys.readouterr().out
    key, hashed = (line.split(maxsplit=1)[1] for line in out.splitlines()[:2])
    assert key.startswith("sk-forebay-")
    assert hashed == hash_key(key)
    assert f'- id: acme\n    keys: [{{hash: "{hashed}"}}]' in out


def test_a_key_is_hashed_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "my-key\n")
    assert run(["keys", "hash"]) == 0
    assert capsys.readouterr().out == hash_key("my-key") + "\n"
    type_in(monkeypatch, "\n")
    assert run(["keys", "hash"]) == 2


def test_ctrl_c_while_the_command_is_imported_shows_no_traceback() -> None:
    pressed = """
import sys

class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Pressed())
from gateway.cli import main
print("went on")
"""
    ended = subprocess.run(
        [sys.executable, "-c", pressed], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_what_runs_no_engine_itself_does_without_torch() -> None:
    """The command, a gateway before other servers, and one whose engines are processes."""
    modules = "gateway.cli, gateway.server, gateway.fleet, gateway.replicas.local, engine.text_side"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class FakeServer(BaseHTTPRequestHandler):
    """Speaks just enough of the API. Answers 'long' with a refusal, 'cut' with half a stream."""

    bodies: list[dict[str, Any]]

    def do_GET(self) -> None:
        if self.path == "/v1/models/org/nope":
            self.answer(404, {"error": {"message": "There is no such model."}})
        else:
            self.answer(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        said = body["messages"][-1]["content"]
        if self.headers["authorization"] != "Bearer right":
            self.answer(401, {"error": {"message": "This API key is not valid."}})
        elif said == "long":
            self.answer(400, {"error": {"message": "too long\x1b[2J"}})
        else:
            self.stream(cut=said == "cut")

    def answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, *, cut: bool) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b": keep-alive\n\n")
        self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        self.event({"choices": [{"delta": {"content": "Hel"}}]})
        self.event({"choices": [{"delta": {"content": "lo\x1b[31m"}}]})
        if cut:
            self.event({"error": {"message": "The engine stopped."}})
            return
        usage = {"prompt_tokens": 20, "completion_tokens": 2}
        self.event(
            {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 16}}}
        )
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, content: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and the bodies that it was sent."""
    FakeServer.bodies = []
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", FakeServer.bodies
        listening.shutdown()
        thread.join()


def test_a_conversation(
    server: tuple[str, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, bodies = server
    type_in(monkeypatch, "hi\n\nlong\ncut\nagain\n")
    arguments = ["chat", "--url", f"{url}/v1/", "--key", "right", "--system", "be brief"]
    assert run([*arguments, "--max-tokens", "9", "--temperature", "0"]) == 0
    written = capsys.readouterr()
    assert "Hello" in written.out
    assert "\x1b" not in written.out + written.err
    assert "16 of 20 prompt tokens cached" in written.out
    assert "TTFT" in written.out
    assert "tokens/s" in written.out
    assert written.err.splitlines() == [
        "forebay: the server answered 400: too long[2J",
        "forebay: the answer broke off: The engine stopped.",
    ]
    assert bodies[0] == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 9,
    }
    # What was refused or broke off is no part of the conversation.
    assert [message["content"] for message in bodies[-1]["messages"]] == [
        "be brief",
        "hi",
        "Hello\x1b[31m",
        "again",
    ]


def test_a_wrong_key_is_one_line(
    server: tuple[str, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    type_in(monkeypatch, "hi\n")
    monkeypatch.setenv("FOREBAY_API_KEY", "wrong")
    assert run(["chat", "--url", server[0], "--model", "tiny"]) == 0
    assert capsys.readouterr().err == (
        "forebay: the server answered 401: This API key is not valid. "
        "(see --key and FOREBAY_API_KEY)\n"
    )


def test_a_model_that_is_not_there_opens_no_chat(
    server: tuple[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["chat", "--url", server[0], "--key", "right", "--model", "org/nope"]) == 1
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith(f"forebay: --model: {server[0]} has no such model for this key")
    assert written.err.endswith("; it lists tiny\n")


def test_ctrl_c_at_the_prompt_leaves(
    server: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert run(["chat", "--url", server[0], "--key", "right", "--model", "tiny"]) == 130


def test_a_server_without_tls_is_not_called_absent(
    server: tuple[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    url = server[0].replace("http:", "https:")
    assert run(["chat", "--url", url, "--key", "right"]) == 1
    assert capsys.readouterr().err.startswith(f"forebay: no TLS with {url}: it is not HTTPS")


def test_a_key_is_made_for_no_tenant_that_could_not_be_configured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["keys", "create", "--tenant", "a b: c"]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("forebay: --tenant: must be 1 to 64")


def test_the_demo_key_of_this_machine_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    StateDir.open({"FOREBAY_STATE_DIR": str(tmp_path / "state")}).demo_key()
    assert run(["chat", "--url", "http://127.0.0.1:1"]) == 1  # got past the key
    assert capsys.readouterr().err == (
        "forebay: no server answers at http://127.0.0.1:1; is `forebay serve` running?\n"
    )


def test_what_commands_a_terminal_is_not_printed() -> None:
    assert printable("a\x1b[2J\x07\x9b\x00b\n\tü😀") == "a[2Jb\n\tü😀"
