"""How the server process starts, reloads, drains and stops."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from gateway.listening import PortUnavailable, base_url, check_tls, listen
from gateway.reload import ConfigSource
from gateway.server import _first_request, _say_if_nobody_is_let_in, serve
from gateway.settings import TlsSettings
from gateway.settings_errors import ConfigError
from gateway.tenants import hash_key

CONFIG = f"""
server: {{port: PORT, drain_s: 5}}
redis: {{url: off}}
models: [{{name: tiny, path: bundled}}]
tenants: [{{id: acme, keys: [{{hash: "{hash_key("key")}"}}]}}]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """A server process and what it wrote."""

    def __init__(self, directory: Path, config: str, behaviour: str) -> None:
        self.port = free_port()
        self.config = directory / "forebay.yaml"
        self.write(config)
        self.url = f"http://127.0.0.1:{self.port}"
        self._output = (directory / "stdout").open("w+")
        self._errors = (directory / "stderr").open("w+")
        environ = {"FOREBAY_STATE_DIR": str(directory / "state"), "HOME": str(directory)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gateway.serving", str(self.config), behaviour],
            stdout=self._output,
            stderr=self._errors,
            env=environ,
            cwd=Path(__file__).parents[2],
        )

    def write(self, config: str) -> None:
        self.config.write_text(config.replace("PORT", str(self.port)))

    @property
    def stdout(self) -> str:
        return Path(self._output.name).read_text()

    @property
    def stderr(self) -> str:
        return Path(self._errors.name).read_text()

    def get(self, path: str) -> httpx.Response | None:
        """The answer, None if nobody listens."""
        try:
            return httpx.get(self.url + path, timeout=5, verify=False)
        except httpx.TransportError:
            return None

    def answers(self, path: str, status: int) -> bool:
        answer = self.get(path)
        return answer is not None and answer.status_code == status

    def until(self, condition: Callable[[], object], timeout_s: float = 15) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.01)

    def until_ready(self) -> None:
        self.until(lambda: self.answers("/health/ready", 200))

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        return self.process.wait(timeout=15)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()
        self._errors.close()


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts server processes and sees to their end."""
    started: list[Process] = []

    def begin(config: str = CONFIG, behaviour: str = "0") -> Process:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        started.append(Process(directory, config, behaviour))
        return started[-1]

    yield begin
    for process in started:
        process.close()


class Stream:
    """A streaming request on a thread of its own."""

    def __init__(self, server: Process, ticks: int) -> None:
        self.lines: list[str] = []
        self.first = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(server, ticks))
        self._thread.start()
        assert self.first.wait(10)

    def _read(self, server: Process, ticks: int) -> None:
        address = f"{server.url}/stream?ticks={ticks}"
        with (
            suppress(httpx.TransportError),  # a server that is killed cuts it off
            httpx.stream("GET", address, timeout=15) as response,
        ):
            for line in response.iter_lines():
                self.lines.append(line)
                self.first.set()

    def last_line(self) -> str:
        self._thread.join(15)
        return self.lines[-1]


def test_it_answers_while_it_loads_then_announces_itself(start: Start) -> None:
    server = start(behaviour="0.6")
    server.until(lambda: server.answers("/health/live", 200))
    answer = server.get("/health/ready")
    assert answer is not None
    assert (answer.status_code, answer.text) == (503, "loading")
    assert "server" not in answer.headers
    server.until_ready()
    server.until(lambda: "curl" in server.stdout)
    assert f"serves tiny at {server.url}" in server.stdout
    assert "$FOREBAY_API_KEY" in server.stdout
    # Not a terminal: nothing but log lines, for whatever collects them.
    assert all(isinstance(json.loads(line), dict) for line in server.stderr.splitlines())
    server.send(signal.SIGTERM)
    assert server.exit_code() == 0
    assert "fleet closed" in server.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_streams_finish_and_refuses_new_calls(
    start: Start, number: signal.Signals
) -> None:
    server = start()
    server.until_ready()
    streams = [Stream(server, ticks=40) for _ in range(3)]
    server.send(number)
    server.until(lambda: server.answers("/stream?ticks=1", 503))
    assert server.answers("/health/ready", 503)
    assert server.answers("/health/live", 200)
    assert [stream.last_line() for stream in streams] == ["[DONE]"] * 3
    assert all(len(stream.lines) == 41 for stream in streams)
    assert server.exit_code() == 0


def test_at_the_deadline_streams_end_with_an_error(start: Start) -> None:
    server = start(CONFIG.replace("drain_s: 5", "drain_s: 200ms"))
    server.until_ready()
    stream = Stream(server, ticks=100_000)
    server.send(signal.SIGTERM)
    assert stream.last_line() == "error"
    assert server.exit_code() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(start: Start, number: signal.Signals) -> None:
    server = start()
    server.until_ready()
    stream = Stream(server, ticks=100_000)
    server.send(number)
    server.until(lambda: server.answers("/health/ready", 503))
    before = time.monotonic()
    server.send(number)
    assert server.exit_code() == 128 + number
    assert time.monotonic() - before < 3
    assert stream.last_line() == "tick"


def test_a_stop_while_loading_ends_the_loading(start: Start) -> None:
    server = start(behaviour="60")
    server.until(lambda: server.answers("/health/live", 200))
    server.send(signal.SIGTERM)
    assert server.exit_code() == 0
    assert "curl" not in server.stdout
    assert "Traceback" not in server.stderr


def test_a_busy_port_is_said_before_anything_is_loaded(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start(CONFIG.replace("PORT", str(port)), behaviour="60")
        assert server.exit_code() == 3
    expected = f"forebay: 127.0.0.1:{port} is in use; stop what listens there or choose another"
    assert server.stderr.startswith(expected)
    assert server.stderr.count("\n") == 1


def test_a_model_that_does_not_load_is_one_line_and_exit_1(start: Start) -> None:
    server = start(behaviour="fail")
    assert server.exit_code() == 1
    assert server.stderr == "forebay: weights.gguf: is cut off after 3 bytes\n"


def test_what_only_starting_can_tell_of_a_configuration_is_exit_2(start: Start) -> None:
    server = start(behaviour="refuse")
    assert server.exit_code() == 2
    assert server.stderr == (
        "forebay: redis/lock: is held by process 1\nforebay: redis: has another secret\n"
    )


def test_a_crash_while_loading_is_logged_and_exit_1(start: Start) -> None:
    server = start(behaviour="crash")
    assert server.exit_code() == 1
    assert "ZeroDivisionError" in server.stderr


def test_a_bad_configuration_is_exit_2(start: Start) -> None:
    server = start(CONFIG.replace("server: {", "server: {prot: 1, "))
    assert server.exit_code() == 2
    assert server.stderr.endswith("server.prot: unknown key; did you mean port?\n")


def test_hangup_and_change_reload(start: Start) -> None:
    server = start()
    server.until_ready()

    def reloads(result: str) -> str:
        answer = server.get("/metrics")
        assert answer is not None
        found = re.search(rf'config_reloads_total{{result="{result}"}} (\S+)', answer.text)
        assert found
        return found[1]

    server.send(signal.SIGHUP)
    server.until(lambda: reloads("success") == "1.0")
    server.write(CONFIG.replace("drain_s: 5", "drain_s: 100ms"))
    server.until(lambda: reloads("success") == "2.0")
    server.write("server: {")
    server.until(lambda: reloads("failure") == "1.0")
    server.until(lambda: "the last good one stays" in server.stderr)
    stream = Stream(server, ticks=100_000)
    server.send(signal.SIGTERM)
    assert stream.last_line() == "error"  # by the reloaded deadline
    assert server.exit_code() == 0


def test_a_head_that_is_too_large_or_broken_is_refused_in_the_envelope(start: Start) -> None:
    server = start()
    server.until_ready()

    def exchange(request: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            answer = b""
            with suppress(ConnectionError):  # it may refuse while we still write
                connection.sendall(request)
            with suppress(ConnectionResetError):
                while piece := connection.recv(65536):
                    answer += piece
            return answer

    head = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"
    many = exchange(head + b"a: b\r\n" * 300 + b"\r\n")
    assert many.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in many
    assert exchange(head + b"a: " + b"b" * 70_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")
    assert exchange(head + b"a: " + b"b" * 70_000).startswith(b"HTTP/1.1 431 ")
    broken = exchange(b"nonsense\r\n\r\n")
    assert broken.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"invalid_http"' in broken
    usual = exchange(head + b"a: " + b"b" * 30_000 + b"\r\nconnection: close\r\n\r\n")
    assert usual.startswith(b"HTTP/1.1 200 ")


def write_certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "forebay test")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(private, hashes.SHA256())
    )
    cert, key = directory / "cert.pem", directory / "key.pem"
    cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert, key


def test_tls(start: Start, tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    tls = f"server: {{tls: {{cert: {cert}, key: {key}}}, "
    server = start(CONFIG.replace("server: {", tls))
    context = ssl.create_default_context(cafile=str(cert))
    server.until(lambda: "curl https://" in server.stdout)
    with httpx.Client(verify=context) as client:
        url = server.url.replace("http:", "https:")
        assert client.get(f"{url}/health/ready").status_code == 200
    server.send(signal.SIGTERM)
    assert server.exit_code() == 0


def test_tls_files_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    check_tls(TlsSettings(cert=cert, key=key))
    check_tls(TlsSettings())
    (tmp_path / "bad.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"^server\.tls: .*bad\.pem .* are not a PEM certificate"):
        check_tls(TlsSettings(cert=tmp_path / "bad.pem", key=key))


def test_listening_takes_the_port_for_good() -> None:
    [first, *rest] = listen("127.0.0.1", 0)
    try:
        assert rest == []
        port = first.getsockname()[1]
        assert base_url([first], "0.0.0.0", tls=False) == f"http://127.0.0.1:{port}"
        assert base_url([first], "::1", tls=True) == f"https://[::1]:{port}"
        with pytest.raises(PortUnavailable, match=rf"^127\.0\.0\.1:{port} is in use"):
            listen("127.0.0.1", port)
    finally:
        first.close()


def test_a_host_that_is_none_of_ours_is_named() -> None:
    with pytest.raises(PortUnavailable, match=r"^203\.0\.113\.1:0 cannot be listened on"):
        listen("203.0.113.1", 0)
    with pytest.raises(PortUnavailable, match=r"^server\.host: no such host\. is not an address"):
        listen("no such host.", 0)


def test_a_weak_secret_is_warned_of_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_: object) -> None:
        raise PortUnavailable("taken")

    monkeypatch.setattr("gateway.server.configure_logging", lambda *_, **__: None)
    monkeypatch.setattr("gateway.server.listen", taken)
    config = tmp_path / "forebay.yaml"
    config.write_text(CONFIG.replace("PORT", "0"))
    for secret, warnings in (("short", 1), ("long enough for us", 0)):
        source = ConfigSource(config, {"FOREBAY_SECRET": secret}, {})
        with capture_logs() as logs, pytest.raises(PortUnavailable):
            serve(source, open_fleet=taken, make_app=taken)
        assert [line["event"] for line in logs] == ["the server secret is weak"] * warnings
        assert secret not in str(logs)


def test_a_start_warns_of_a_variable_that_is_nearly_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_: object) -> None:
        raise PortUnavailable("taken")

    monkeypatch.setattr("gateway.server.configure_logging", lambda *_, **__: None)
    monkeypatch.setattr("gateway.server.listen", taken)
    config = tmp_path / "forebay.yaml"
    config.write_text(CONFIG.replace("PORT", "0"))
    environ = {"FOREBAY_PORT": "8123", "FOREBAY_STATE_DIR": str(tmp_path / "state")}
    with capture_logs() as logs, pytest.raises(PortUnavailable):
        serve(ConfigSource(config, environ, {}), open_fleet=taken, make_app=taken)
    [line] = logs
    assert (line["variable"], line["did_you_mean"]) == ("FOREBAY_PORT", "FOREBAY_SERVER__PORT")


@pytest.mark.parametrize(("tenants", "admin_key"), [(0, False), (0, True), (1, False)])
def test_a_start_says_how_somebody_gets_in(tmp_path: Path, tenants: int, admin_key: bool) -> None:
    config = tmp_path / "forebay.yaml"
    lines = CONFIG.replace("PORT", "0").splitlines()
    config.write_text("\n".join(line for line in lines if tenants or "tenants" not in line))
    environ = {"FOREBAY_ADMIN_KEY": "k" * 40} if admin_key else {}
    with capture_logs() as logs:
        _say_if_nobody_is_let_in(ConfigSource(config, environ, {}).load())
    assert len(logs) == 1 - tenants
    for line in logs:
        assert line["log_level"] == ("info" if admin_key else "warning")
        assert "`forebay tenants create`" in line["event"]
        assert admin_key or line["key_from"] == "FOREBAY_ADMIN_KEY"


def test_the_request_to_paste_is_valid_and_calm_for_the_demo_alone() -> None:
    for demo_key in ("sk-demo", None):
        words = shlex.split(_first_request("http://here", "tiny", demo_key))
        body = json.loads(words[-1])
        assert body["model"] == "tiny"
        assert body.get("temperature") == (0.2 if demo_key else None)
        assert f"Authorization: Bearer {demo_key or '$FOREBAY_API_KEY'}" in words
