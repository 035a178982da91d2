"""How a gateway stops, how it fails to start, and what it says when its engine dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
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


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory, tiny: Path
) -> Iterator[dict[str, GatewayProcess]]:
    """A gateway for each of the tests that end one, by its name: started at once, on all cores. The
    engine of `mortal` dies when there is a file `fatal` in its directory."""
    mortal = tmp_path_factory.mktemp("mortal")
    environ = KEYS | {"MORTAL_FILE": str(mortal / "fatal")}
    command = (sys.executable, "-m", "tests.e2e.mortal_gateway", "serve")
    with ExitStack() as held:
        gateways = {
            name: held.enter_context(
                GatewayProcess(tmp_path_factory.mktemp(name), config(tiny, drain_s), KEYS)
            )
            for name, drain_s in (("patient", 60), ("hasty", 0.2), ("stopped twice", 60))
        }
        gateways["mortal"] = held.enter_context(
            GatewayProcess(mortal, config(tiny, 60), environ, command)
        )
        yield gateways


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


def test_a_stop_lets_streams_finish_and_refuses_new_calls(
    started: dict[str, GatewayProcess],
) -> None:
    gateway = started["patient"].until_ready()
    with (
        httpx.Client(base_url=gateway.url, timeout=60, verify=False) as http,
        ThreadPoolExecutor(STREAMS) as threads,
    ):
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


def test_at_the_deadline_streams_end_with_an_error(started: dict[str, GatewayProcess]) -> None:
    gateway = started["hasty"].until_ready()
    with ThreadPoolExecutor(STREAMS) as threads:
        streams = start_streams(gateway, threads, max_tokens=8000)
        gateway.send(signal.SIGTERM)
        for stream in streams:
            streamed = stream.result()
            assert not streamed.done
            assert streamed.finish_reasons() == []
            assert streamed.events[-1]["error"]["code"] == "engine_unavailable"
        assert gateway.exit_code() == 0


def test_a_second_stop_does_not_wait(started: dict[str, GatewayProcess]) -> None:
    gateway = started["stopped twice"].until_ready()
    with ThreadPoolExecutor(STREAMS) as threads:
        streams = start_streams(gateway, threads, max_tokens=8000)
        gateway.send(signal.SIGTERM)
        eventually(lambda: gateway.status_of("/health/ready") == 503, 2)
        gateway.send(signal.SIGTERM)
        sent = time.monotonic()
        assert gateway.exit_code() == 128 + signal.SIGTERM
        assert time.monotonic() - sent < 1
        for stream in streams:
            with pytest.raises(httpx.RemoteProtocolError):
                stream.result()


def test_a_dead_engine_is_said_to_everybody(started: dict[str, GatewayProcess]) -> None:
    gateway = started["mortal"].until_ready()
    with (
        httpx.Client(base_url=gateway.url, timeout=60, verify=False) as http,
        ThreadPoolExecutor(STREAMS) as threads,
    ):
        streams = start_streams(gateway, threads, max_tokens=8000)
        (gateway.directory / "fatal").touch()
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


def run_all(
    tmp_path: Path, starts: Sequence[tuple[str, Mapping[str, str]]]
) -> list[subprocess.CompletedProcess[str]]:
    """Start gateways that are not meant to come up, each with a configuration and more of an
    environment; as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        runs = [
            threads.submit(run, tmp_path / f"start-{number}", text, environ)
            for number, (text, environ) in enumerate(starts)
        ]
        return [finished.result() for finished in runs]


def run(directory: Path, text: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Start a gateway that is not meant to come up."""
    directory.mkdir()
    file = directory / "forebay.yaml"
    file.write_text(text)
    return subprocess.run(
        [*SERVE, "--config", str(file)],
        env=environment(directory, {**KEYS, **environ}),
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
    finished = run(tmp_path / "late", config(tiny, 1).replace("PORT", str(gateway.port)), {})
    assert finished.returncode == 3
    assert f"127.0.0.1:{gateway.port}" in only_line(finished)
    assert "weights" not in finished.stderr


def damaged(tmp_path: Path, tiny: Path, damage: str) -> Path:
    """A copy of the tiny model with something wrong."""
    model = tmp_path / damage
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
    return model


def test_a_damaged_model_is_named(tmp_path: Path, tiny: Path) -> None:
    models = [damaged(tmp_path, tiny, damage) for damage in ("truncated", "missing", "no config")]
    configs = [config(model, 1).replace("PORT", "0") for model in models]
    for model, finished in zip(
        models, run_all(tmp_path, [(text, {}) for text in configs]), strict=True
    ):
        assert finished.returncode in (1, 2)
        assert str(model) in only_line(finished)


def test_a_bad_value_in_the_environment_names_its_variable(tmp_path: Path, tiny: Path) -> None:
    bad = [
        *(("FOREBAY_SERVER__PORT", value) for value in ("", "abc", "-1", "1e3", "70000")),
        ("FOREBAY_MODELS__0__MAX_CONTEXT", "-1"),
        ("FOREBAY_SERVER__DRAIN_S", "soon"),
    ]
    text = config(tiny, 1).replace("PORT", "0")
    every = run_all(tmp_path, [(text, {variable: value}) for variable, value in bad])
    for (variable, value), finished in zip(bad, every, strict=True):
        assert finished.returncode == 2, value
        assert variable in only_line(finished), value
