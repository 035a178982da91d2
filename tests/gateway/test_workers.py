"""Several workers under one parent: started, started again, told to stop, waited for."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

import gateway.cli.workers as module
from gateway.cli.main import run
from gateway.cli.serve_workers import require_same, start_worker
from gateway.cli.workers import Spawn, Workers
from gateway.reload import ConfigSource
from gateway.settings_errors import ConfigError
from gateway.shared_port import SharedPort
from gateway.tenants import hash_key

FAKE = str(Path(__file__).with_name("fake_worker.py"))
ANNOUNCEMENT = "forebay serves\ncurl\n"


class Stage:
    """Fake workers: worker i's runs behave as its row says, the last entry from then on."""

    def __init__(self, directory: Path, *behaviours: Sequence[str]) -> None:
        self._directory = directory
        self._behaviours = [list(each) for each in behaviours]
        self.count = len(behaviours)

    async def spawn(self, index: int) -> Process:
        rows = self._behaviours[index]
        behaviour = rows.pop(0) if len(rows) > 1 else rows[0]
        command = [sys.executable, "-I", "-S", FAKE, str(self._diary(index)), *behaviour.split()]
        return await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE)

    def diary(self, index: int) -> list[str]:
        """What the worker of this index has written, over all of its runs; starts without pids."""
        return [line.split()[0] for line in self._lines(index)]

    def pid(self, index: int) -> int:
        """Of its latest run."""
        return int(
            [line for line in self._lines(index) if line.startswith("started")][-1].split()[1]
        )

    def _diary(self, index: int) -> Path:
        return self._directory / f"diary-{index}"

    def _lines(self, index: int) -> list[str]:
        diary = self._diary(index)
        return diary.read_text().splitlines() if diary.exists() else []


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - other processes' doings set no event here
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(count: int, spawn: Spawn) -> AsyncIterator[asyncio.Task[int]]:
    """Workers under this process, whose signals are theirs as long as the scope lasts."""
    task = asyncio.create_task(Workers(count, spawn).run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def tell(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MutableMapping[str, Any]]]:
    """What the parent logs, kept off its standard output. There are no pauses between runs."""
    monkeypatch.setattr(module, "_RETRY_S", (0.001,))
    with capture_logs() as entries:
        yield entries


async def test_the_address_is_announced_once_when_all_are_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "go"
    stage = Stage(tmp_path, [""], [f"wait {go}"], [""])
    async with running(stage.count, stage.spawn) as task:
        await until(lambda: all(stage.diary(index) for index in range(3)))
        assert capsys.readouterr().out == ""
        go.touch()
        written: list[str] = []
        await until(lambda: written.append(capsys.readouterr().out) or "".join(written))
        tell(signal.SIGTERM)
        assert await task == 0
    assert "".join(written) + capsys.readouterr().out == ANNOUNCEMENT
    assert [stage.diary(index) for index in range(3)] == [["started", "SIGTERM"]] * 3


async def test_a_worker_that_dies_is_started_again_and_the_others_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # What it finds wrong on its way back ends nobody: the others have the last good configuration.
    stage = Stage(tmp_path, [""], ["", "exit 2", "die", ""])
    async with running(stage.count, stage.spawn) as task:
        await until(lambda: capsys.readouterr().out)
        os.kill(stage.pid(1), signal.SIGKILL)
        await until(lambda: stage.diary(1).count("started") == 4)
        tell(signal.SIGTERM)
        assert await task == 0
    assert stage.diary(0) == ["started", "SIGTERM"]
    assert stage.diary(1)[:4] == ["started"] * 4
    assert capsys.readouterr().out == ""


async def test_one_that_would_be_unlike_the_others_waits_until_the_configuration_allows_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    logged: list[MutableMapping[str, Any]],
) -> None:
    stage = Stage(tmp_path, [""], [""])
    refusals: list[str] = []

    async def spawn(index: int) -> Process:
        if refusals:
            raise ConfigError([refusals.pop()])
        return await stage.spawn(index)

    async with running(stage.count, spawn) as task:
        await until(lambda: capsys.readouterr().out)
        refusals += ["models: needs a restart to change"] * 2
        os.kill(stage.pid(1), signal.SIGKILL)
        await until(lambda: stage.diary(1).count("started") == 2)
        tell(signal.SIGTERM)
        assert await task == 0
    assert stage.diary(0) == ["started", "SIGTERM"]
    said = [
        entry for entry in logged if entry["event"] == "config refused, a worker is not started"
    ]
    assert [(entry["worker"], entry["reason"]) for entry in said] == [
        (1, "models: needs a restart to change")
    ] * 2


def test_a_worker_that_starts_again_must_be_as_the_others_are(tmp_path: Path) -> None:
    config = tmp_path / "forebay.yaml"
    config.write_text(CONFIG)
    source = ConfigSource(config, {}, {})
    settings = source.load().settings
    config.write_text(CONFIG.replace("id: acme", "id: beta").replace("drain_s: 5", "drain_s: 6"))
    require_same(source, settings)
    config.write_text(CONFIG.replace("name: tiny", "name: other"))
    with pytest.raises(ConfigError, match=r"models\[0\].name: needs a restart to change"):
        require_same(source, settings)
    config.write_text(CONFIG.replace("drain_s: 5", "drain_s: -5"))
    with pytest.raises(ConfigError, match="drain_s"):
        require_same(source, settings)


@pytest.mark.parametrize(
    ("end", "code"), [("exit 2", 2), ("exit 3", 3), ("exit 1", 1), ("exit 0", 1), ("die", 1)]
)
async def test_one_that_does_not_start_ends_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, code: int
) -> None:
    stage = Stage(tmp_path, [""], [end])
    async with running(stage.count, stage.spawn) as task:
        assert await asyncio.wait_for(task, 10) == code
    assert stage.diary(1) == ["started"]
    assert stage.diary(0) in (["started", "SIGTERM"], ["started"], [])
    assert capsys.readouterr().out == ""


async def test_a_reload_reaches_all_and_one_that_is_starting_when_it_is_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "go"
    stage = Stage(tmp_path, [""], ["", f"wait {go}"])
    async with running(stage.count, stage.spawn) as task:
        await until(lambda: capsys.readouterr().out)
        tell(signal.SIGHUP)
        await until(lambda: stage.diary(0) == stage.diary(1) == ["started", "SIGHUP"])
        os.kill(stage.pid(1), signal.SIGKILL)
        await until(lambda: stage.diary(1)[2:] == ["started"])
        tell(signal.SIGHUP)
        await until(lambda: stage.diary(0).count("SIGHUP") == 2)
        assert stage.diary(1)[2:] == ["started"]
        go.touch()
        await until(lambda: stage.diary(1)[2:] == ["started", "SIGHUP"])
        tell(signal.SIGINT)
        assert await task == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_stops_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    stage = Stage(tmp_path, ["stay"], ["stay"])
    async with running(stage.count, stage.spawn) as task:
        await until(lambda: capsys.readouterr().out)
        tell(number)
        await until(lambda: stage.diary(0) == stage.diary(1) == ["started", "SIGTERM"])
        tell(number)
        assert await asyncio.wait_for(task, 10) == 128 + number
    assert stage.diary(0) == stage.diary(1) == ["started", "SIGTERM", "SIGTERM"]


async def test_one_that_does_not_hear_is_killed_after_the_second_signal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CUT_S", 0.05)
    stage = Stage(tmp_path, [""], ["deaf"])
    async with running(stage.count, stage.spawn) as task:
        await until(lambda: capsys.readouterr().out)
        tell(signal.SIGTERM)
        await until(lambda: stage.diary(1) == ["started", "SIGTERM"])
        assert not task.done()
        tell(signal.SIGTERM)
        assert await asyncio.wait_for(task, 10) == 128 + signal.SIGTERM


async def test_a_stop_during_a_pause_starts_nobody_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_S", (60.0,))
    stage = Stage(tmp_path, [""])
    async with running(stage.count, stage.spawn) as task:
        await until(lambda: capsys.readouterr().out)
        pid = stage.pid(0)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not Path(f"/proc/{pid}").exists())
        tell(signal.SIGTERM)
        assert await asyncio.wait_for(task, 10) == 0
    assert stage.diary(0) == ["started"]


CONFIG = f"""
server: {{host: 127.0.0.1, port: 0, drain_s: 5}}
redis: {{url: off}}
models: [{{name: tiny, path: bundled}}]
tenants: [{{id: acme, keys: [{{hash: "{hash_key("key")}"}}]}}]
"""


class Gateway:
    """How one is seen over HTTP, a new connection for each question."""

    def __init__(self, port: SharedPort, http: httpx.AsyncClient) -> None:
        self._url = f"http://127.0.0.1:{port.port}"
        self._http = http

    async def get(self, path: str) -> httpx.Response:
        return await self._http.get(self._url + path, timeout=20)

    async def ready(self) -> bool:
        try:
            return (await self.get("/health/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def until_ready(self) -> None:
        async with asyncio.timeout(30):
            while not await self.ready():  # noqa: ASYNC110 - as in until
                await asyncio.sleep(0.02)


async def test_gateways_share_a_port_and_survive_one_anothers_death(tmp_path: Path) -> None:
    config = tmp_path / "forebay.yaml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "tests.gateway.serving", str(config)]
    environ = {**os.environ, "FOREBAY_STATE_DIR": str(tmp_path)}
    pids: dict[int, list[int]] = {0: [], 1: []}
    with ExitStack() as held:
        shared, *own = [held.enter_context(SharedPort.reserved("127.0.0.1", 0)) for _ in range(3)]

        async def spawn(index: int) -> Process:
            process = await start_worker([shared, own[index]], command, environ)
            pids[index].append(process.pid)
            return process

        async with (
            httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0)) as http,
            running(2, spawn) as task,
        ):
            both, *each = [Gateway(port, http) for port in (shared, *own)]
            for gateway in each:
                await gateway.until_ready()
            stream = asyncio.create_task(each[0].get("/stream?ticks=60"))
            os.kill(pids[1][0], signal.SIGKILL)
            await until(lambda: len(pids[1]) == 2)
            # Nobody listens on the dead one's sockets, so that the other has all connections.
            assert all([await both.ready() for _ in range(8)])
            await each[1].until_ready()
            tell(signal.SIGTERM)
            assert (await stream).text.endswith("[DONE]\n")
            assert await asyncio.wait_for(task, 15) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers", "2"], "--workers: model tiny is run by the gateway itself"),
        (["--workers", "0"], "Invalid value for '--workers'"),
        (["--worker-ports", "9000"], "--worker-ports: needs --workers"),
        (["--workers", "2", "--worker-ports", "65535"], "--worker-ports: there are no 2 ports"),
    ],
)
def test_what_workers_cannot_do_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    config = tmp_path / "forebay.yaml"
    config.write_text(CONFIG)
    assert run(["serve", "--config", str(config), *flags]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith(f"forebay: {message}")
    assert written.err.count("\n") == 1


def test_the_embedded_redis_of_workers_goes_by_the_server_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(Exception):
        pass

    def begin(*_: object, secret: bytes) -> None:
        raise Begun(secret)

    monkeypatch.setenv("FOREBAY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FOREBAY_SECRET", "a secret that is long enough")
    monkeypatch.setattr("gateway.cli.serve_workers.embedded_redis", begin)
    monkeypatch.setattr("gateway.cli.serve_workers.configure_logging", lambda *_, **__: None)
    remote = "{url: 'http://127.0.0.1:1/v1', engine: openai, shared_cache: accept}"
    config = tmp_path / "forebay.yaml"
    config.write_text(
        f"server: {{port: 0}}\nredis: {{url: embedded}}\n"
        f"models: [{{name: m, remote: [{remote}]}}]\n"
        f'tenants: [{{id: acme, keys: [{{hash: "{hash_key("key")}"}}]}}]\n'
    )
    before = signal.getsignal(signal.SIGHUP)
    with pytest.raises(Begun, match="a secret that is long enough"):
        run(["serve", "--config", str(config), "--workers", "2"])
    assert signal.getsignal(signal.SIGHUP) is before
