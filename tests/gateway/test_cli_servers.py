"""What the operator's commands say of servers, keys and surroundings that are not as they should
be: one line, and never a traceback."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gateway.cli.main import run

COMMANDS = (
    ("tenants", "list"),
    ("tenants", "show", "t"),
    ("tenants", "delete", "t", "--yes"),
    ("keys", "list"),
    ("keys", "issue", "t"),
    ("keys", "revoke", "k"),
    ("usage",),
    ("audit",),
    ("cache", "stats"),
    ("cache", "explain", "x"),
    ("cache", "flush"),
)
MEMBERS = (
    "tenants",
    "source",
    "keys_revoked",
    "keys",
    "key",
    "state",
    "data",
    "entries",
    "models",
    "requests",
)


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.setenv("FOREBAY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FOREBAY_ADMIN_KEY", "the operator's own key")


@contextmanager
def answering(body: bytes, *headers: tuple[str, str]) -> Iterator[tuple[str, list[str]]]:
    """A server that answers everything alike: its address, and the keys that it was shown."""
    keys: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            keys.append(self.headers["authorization"])
            self.send_response(200)
            for header in (*headers, ("content-length", str(len(body)))):
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_DELETE = do_GET  # noqa: N815 - names of the base class's making

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", keys
        finally:
            listening.shutdown()
            thread.join()


def complaint(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    assert run(list(arguments)) == code
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("forebay: ")
    return said.removeprefix("forebay: ").rstrip()


@pytest.mark.parametrize("member", [[{}], "text"], ids=repr)
def test_an_answer_that_is_not_made_as_ours(
    capsys: pytest.CaptureFixture[str], member: object
) -> None:
    body = json.dumps(dict.fromkeys(MEMBERS, member)).encode()
    with answering(body) as (url, _):
        for command in COMMANDS:
            said = complaint(capsys, 1, *command, "--url", url)
            assert said.startswith(f"what answers at {url}/admin/"), command
            assert said.endswith("is not forebay, or not of this version; --json shows its answer")


def test_an_answer_that_is_not_compressed_as_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(b"plain", ("content-encoding", "gzip")) as (url, _):
        for command in (("keys", "list"), ("ledger", "export")):
            said = complaint(capsys, 1, *command, "--url", url)
            assert said == f"what answers at {url} is not forebay"


def test_a_key_is_sent_without_what_a_file_puts_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_ADMIN_KEY", " operators-key\n")
    with answering(b'{"keys": []}') as (url, keys):
        assert run(["keys", "list", "--url", url]) == 0
    assert keys == ["Bearer operators-key"]


def test_a_key_that_no_header_can_carry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREBAY_ADMIN_KEY", "one\ntwo")
    said = complaint(capsys, 2, "keys", "list")
    assert said.startswith("the key has a line break")
    assert "two" not in said
    monkeypatch.setenv("FOREBAY_ADMIN_KEY", os.fsdecode(b"k\xff"))  # is sent as it is
    assert complaint(capsys, 1, "keys", "list", "--url", "http://127.0.0.1:1").startswith("no serv")


def test_surroundings_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("ALL_PROXY", "gopher://127.0.0.1:1")
        assert complaint(capsys, 2, "keys", "list").startswith("the proxy that HTTP_PROXY")
    monkeypatch.setenv("SSL_CERT_FILE", "/nothing.pem")
    said = complaint(capsys, 2, "keys", "list")
    assert said.startswith("SSL_CERT_FILE: cannot be read as certificates (No such file")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("keys", "revoke", os.fsdecode(b"\xff")), "a character here cannot be sent"),
        (("tenants", "create", "t", "--set", "weight=.nan"), "--set: a value is neither text nor"),
    ],
)
def test_arguments_that_cannot_be_sent(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert complaint(capsys, 2, *arguments).startswith(message)


def test_an_export_to_what_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reading = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reading.start()
    with answering(b"id\n1\n") as (url, _):
        assert run(["ledger", "export", "--url", url, "--output", str(pipe)]) == 0
        reading.join(5)
        assert read == [b"id\n1\n"]
        assert pipe.is_fifo()
        link, file = tmp_path / "link", tmp_path / "file"
        link.symlink_to(file)
        assert run(["ledger", "export", "--url", url, "--output", str(link)]) == 0
        assert (link.is_symlink(), file.read_bytes()) == (True, b"id\n1\n")
        circle = tmp_path / "circle"
        circle.symlink_to(circle)
        assert run(["ledger", "export", "--url", url, "--output", str(circle)]) == 0
        assert circle.read_bytes() == b"id\n1\n"
        said = complaint(capsys, 1, "ledger", "export", "--url", url, "--output", "/dev/full")
        assert said == "/dev/full: cannot be written (No space left on device)"


@pytest.mark.parametrize("event", ["{", "[]", '{"choices": [{}]}', '{"error": 1}'])
def test_a_chat_with_what_streams_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], event: str
) -> None:
    said = iter(["hello"])

    def type_in(_: str) -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", type_in)
    with answering(f"data: {event}\n\n".encode()) as (url, _):
        assert run(["chat", "--url", url, "--key", "k", "--model", "m"]) == 0
    assert capsys.readouterr().err == (
        f"forebay: what answers at {url} does not stream as OpenAI's API does\n"
    )
