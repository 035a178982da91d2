"""How a gateway stops, how it fails to start, and what it says when its engine dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.client import ACME_KEY, CHAT, Client, Streamed, chat
from tests.e2e.conftest import KEYS, TENANTS
from tests.e2e.gateway_process import ROOT, SERVE, GatewayProcess, environment, eventually

LONG = chat("x", "tiny", max_tokens=2000, ignore_eos=True, temperature=1)
STREAMS = 5


def config(tiny: Path, drain_s: float) -> str:
    return f"""
server: {{port: PORT, drain_s: {drain_s}, log_format: json}}
models:
  - {{name: tiny, path: "{tiny}", dtype: float32, max_context: 8192, max_running: 4,
     cache: {{device: 32MiB}}}}
{TENANTS}
"""


def read_stream(url: str, fields: dict[str, object]) -> Streamed:
    with httpx.Client(base_url=url, timeout=60, verify=False) as http:
        return Client(http, ACME_KEY).stream(CHAT, LONG | fields)


def taken(gateway: GatewayProcess) -> tuple[float, float]:
    """How many sequences run and how many wait."""
    metrics = gateway.metrics()
    return metrics.total("forebay_running"), metrics.total("forebay_waiting")


def start_streams(
    gateway: GatewayProcess, threads: ThreadPoolExecutor, **fields: object
) -> list[Future[Streamed]]:
    """Five streams of which four run and one waits in line."""
    streams = [threads.submit(read_stream, gateway.url, fields) for _ in range(STREAMS)]
    eventually(lambda: taken(gateway) == (STREAMS - 1, 1), 20)
    return streams


def test_a_stop_lets_streams_finish_and_refuses_new_calls(tmp_path: Path, tiny: Path) -> None:
    with (
        GatewayProcess(tmp_path, config(tiny, 60), KEYS) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60, verify=False) as http,
        ThreadPoolExecutor(STREAMS) as threads,
    ):
        gateway.until_ready()
        late = Client(http, ACME_KEY)
        late.whole(CHAT, chat("x", "tiny", max_tokens=1))
        streams = start_streams(gateway, threads)
        gateway.send(signal.SIGTERM)
        eventually(lambda: gateway.status_of("/health/ready") == 503, 2)
        assert gateway.status_of("/health/live") == 200
        refused = late.post(CHAT, LONG)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        for stream in streams:
            streamed = stream.result()
            assert streamed.done
            assert streamed.finish_reasons() == ["length"]
        assert gateway.exit_code() == 0
        assert gateway.output.count('"outcome":"success"') == STREAMS + 1
        assert '"generated_tokens":2000' in gateway.output


def test_at_the_deadline_streams_end_with_an_error(tmp_path: Path, tiny: Path) -> None:
    with (
        GatewayProcess(tmp_path, config(tiny, 0.2), KEYS) as gateway,
        ThreadPoolExecutor(STREAMS) as threads,
    ):
        streams = start_streams(gateway.until_ready(), threads, max_tokens=8000)
        gateway.send(signal.SIGTERM)
        for stream in streams:
            streamed = stream.result()
            assert not streamed.done
            assert streamed.finish_reasons() == []
            assert streamed.events[-1]["error"]["code"] == "engine_unavailable"
        assert gateway.exit_code() == 0


def test_a_second_stop_does_not_wait(tmp_path: Path, tiny: Path) -> None:
    with (
        GatewayProcess(tmp_path, config(tiny, 60), KEYS) as gateway,
        ThreadPoolExecutor(STREAMS) as threads,
    ):
        streams = start_streams(gateway.until_ready(), threads, max_tokens=8000)
        gateway.send(signal.SIGTERM)
        eventually(lambda: gateway.status_of("/health/ready") == 503, 2)
        gateway.send(signal.SIGTERM)
        sent = time.monotonic()
        assert gateway.exit_code() == 128 + signal.SIGTERM
        assert time.monotonic() - sent < 1
        for stream in streams:
            with pytest.raises(httpx.RemoteProtocolError):
                stream.result()


def test_a_dead_engine_is_said_to_everybody(tmp_path: Path, tiny: Path) -> None:
    fatal = tmp_path / "fatal"
    with (
        GatewayProcess(
            tmp_path,
            config(tiny, 60),
            KEYS | {"MORTAL_FILE": str(fatal)},
            (sys.executable, "-m", "tests.e2e.mortal_gateway", "serve"),
        ) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60, verify=False) as http,
        ThreadPoolExecutor(STREAMS) as threads,
    ):
        streams = start_streams(gateway.until_ready(), threads, max_tokens=8000)
        fatal.touch()
        for stream in streams:
            streamed = stream.result(timeout=10)
            assert not streamed.done
            assert streamed.finish_reasons() == []
            assert streamed.events[-1]["error"]["code"] == "engine_unavailable"
        ready = http.get("/health/ready")
        assert ready.status_code == 503
        assert ready.json()["reason"] == "no replica of tiny serves"
        assert gateway.status_of("/health/live") == 200
        late = Client(http, ACME_KEY).post(CHAT, LONG)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_unavailable")
        metrics = gateway.metrics()
        assert metrics.total("forebay_replica_alive") == 0
        assert metrics.held() == {}
        assert "the books do not add up" in gateway.output
        gateway.send(signal.SIGTERM)
        assert gateway.exit_code() == 0


def run(tmp_path: Path, text: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Start a gateway that is not meant to come up."""
    file = tmp_path / "forebay.yaml"
    file.write_text(text)
    return subprocess.run(
        [*SERVE, "--config", str(file)],
        env=environment(tmp_path, KEYS | environ),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def only_line(finished: subprocess.CompletedProcess[str]) -> str:
    """The one line that it said."""
    lines = [line for line in finished.stderr.splitlines() if line.startswith("forebay:")]
    assert len(lines) == 1, finished.stderr
    assert "Traceback" not in finished.stderr
    assert "serves" not in finished.stdout
    return lines[0]


def test_a_taken_port_is_said_at_once(gateway: GatewayProcess, tmp_path: Path, tiny: Path) -> None:
    finished = run(tmp_path, config(tiny, 1).replace("PORT", str(gateway.port)))
    assert finished.returncode == 3
    assert f"127.0.0.1:{gateway.port}" in only_line(finished)
    assert "weights" not in finished.stderr


@pytest.mark.parametrize("damage", ["truncated", "missing", "no config"])
def test_a_damaged_model_is_named(tmp_path: Path, tiny: Path, damage: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    weights = model / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "missing":
        weights.unlink()
    else:
        (model / "config.json").write_text("{")
    finished = run(tmp_path, config(model, 1).replace("PORT", "0"))
    assert finished.returncode in (1, 2)
    assert str(model) in only_line(finished)


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("FOREBAY_SERVER__PORT", ("", "abc", "-1", "1e3", "70000")),
        ("FOREBAY_MODELS__0__MAX_CONTEXT", ("-1",)),
        ("FOREBAY_SERVER__DRAIN_S", ("soon",)),
    ],
)
def test_a_bad_value_in_the_environment_names_its_variable(
    tmp_path: Path, tiny: Path, variable: str, values: tuple[str, ...]
) -> None:
    for value in values:
        finished = run(tmp_path, config(tiny, 1).replace("PORT", "0"), **{variable: value})
        assert finished.returncode == 2
        assert variable in only_line(finished)
