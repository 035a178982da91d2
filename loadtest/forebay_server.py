"""A forebay of our own: started for a measurement, stopped after it."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from loadtest.bench.campaign import CampaignError
from loadtest.wire.connection import Endpoint, ExchangeError, fetch

MODEL = "smollm2-135m-instruct"
KEY_VARIABLE = "FOREBAY_LOADTEST_KEY"
"""Holds the key that a server is started with, for its configuration to name."""
_READY_S = 180.0
_POLL_S = 0.2
_STOP_S = 45.0
_LOG_TAIL_LINES = 15

_CONFIG = f"""\
models:
  - name: {MODEL}
    path: bundled
tenants:
  - id: loadtest
    keys: [{{env: {KEY_VARIABLE}}}]
"""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A ready server; `endpoint` has its key, and what is written to `config` it takes to at
    SIGHUP. It goes when the scope that made it ends."""

    endpoint: Endpoint
    pid: int
    start_s: float
    config: Path


@asynccontextmanager
async def running_forebay(
    settings: Mapping[str, str] | None = None,
    *,
    state_dir: Path | None = None,
    config: str = _CONFIG,
    flags: Sequence[str] = (),
) -> AsyncIterator[RunningServer]:
    """`forebay serve` on a free port, with the bundled model unless `config` says otherwise, and
    a key of its own; stopped by SIGTERM at the end of the scope.

    Its state goes with the scope too, unless it is kept in `state_dir`. Settings can still be
    overridden by FOREBAY_* variables, as everywhere; `settings` are more of them, and `flags` go
    behind those that are needed. Raises CampaignError with the end of its log if it does not become
    ready.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="forebay-loadtest-") as directory:
        scratch = Path(directory)
        where = _Files(scratch, state_dir or scratch / "state")
        where.config.write_text(config)
        with _started(where, settings or {}, flags) as server:
            await _until_ready(server)
            took_s = time.monotonic() - started_s
            yield RunningServer(server.endpoint, server.process.pid, took_s, where.config)


class _Files(NamedTuple):
    """Where a server's files are: `scratch` is for one run, `state` is what it keeps."""

    scratch: Path
    state: Path

    @property
    def config(self) -> Path:
        """Its configuration."""
        return self.scratch / "forebay.yaml"


class _Server(NamedTuple):
    process: subprocess.Popen[bytes]
    endpoint: Endpoint
    log: Path


@contextmanager
def _started(files: _Files, settings: Mapping[str, str], flags: Sequence[str]) -> Iterator[_Server]:
    """The process; ended with the scope."""
    key, port = secrets.token_urlsafe(32), free_port()
    log = files.scratch / "forebay.log"
    environment = {KEY_VARIABLE: key, "FOREBAY_STATE_DIR": str(files.state)}
    with log.open("wb") as output:
        # A session of its own: Ctrl-C in the terminal is for the measurement, which then stops it.
        process = subprocess.Popen(
            [
                *(_forebay_command(), "serve", "--config", str(files.config)),
                *("--port", str(port), *flags),
            ],
            env={**os.environ, **environment, **settings},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield _Server(process, Endpoint("127.0.0.1", port, "/v1", key=key), log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _until_ready(server: _Server) -> None:
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s:
        if (code := server.process.poll()) is not None:
            raise CampaignError(f"forebay serve ended with code {code}{_tail(server.log)}")
        # Until it listens, there is nobody to answer.
        with suppress(ExchangeError):
            if (await fetch(server.endpoint, "GET", "/health/ready")).status == 200:
                return
        await asyncio.sleep(_POLL_S)
    raise CampaignError(f"forebay serve was not ready within {_READY_S:g} s{_tail(server.log)}")


def _forebay_command() -> str:
    """The command installed beside this Python, else the one on the path."""
    beside = Path(sys.executable).with_name("forebay")
    found = str(beside) if beside.exists() else shutil.which("forebay")
    if found is None:
        raise CampaignError(f"forebay: no such command beside {sys.executable} or on the path")
    return found


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _tail(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    return "".join(f"\n  {line}" for line in lines)
