"""A worker's process: started with nothing but a socket, and gone when the scope ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from gateway.replicas.worker.connection import Connection
from gateway.replicas.worker.log_relay import LogRelay
from gateway.replicas.worker.messages import FromWorker

PROGRAM = (sys.executable, "-P", "-m", "gateway.replicas.worker")
"""`-P`: a folder called `cache` or `engine` where the gateway was started is not ours."""

_LAUNCHER = Path(__file__).parents[2] / "die_with_parent.py"
_MACHINE_VARIABLES = frozenset({"FOREBAY_CACHE_DIR", "FOREBAY_NATIVE", "FOREBAY_NATIVE_ISA"})
_LOGS_S = 1.0
"""How long a child of the worker may keep its log open once the worker has ended."""


class WorkerProcess:
    """The process and what leads to it."""

    def __init__(self, process: asyncio.subprocess.Process, connection: Connection) -> None:
        self._process = process
        self.connection = connection

    @property
    def pid(self) -> int:
        """The operating system's number for it."""
        return self._process.pid

    def terminate(self) -> None:
        """Once it was told to stop: do so now, whatever is not saved yet (SIGTERM). Harmless if it
        has ended."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """End it (SIGKILL), also when it is stopped. Harmless if it has ended."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def ended(self, timeout_s: float) -> str | None:
        """Wait until it has ended, at most `timeout_s`: how it ended, None if it has not."""
        try:
            async with asyncio.timeout(timeout_s):
                return _how(await self._process.wait())
        except TimeoutError:
            return None


@asynccontextmanager
async def running_worker(
    replica: str,
    environ: Mapping[str, str],
    *,
    receive: Callable[[FromWorker], None],
    lost: Callable[[str], None],
    program: Sequence[str] = PROGRAM,
) -> AsyncIterator[WorkerProcess]:
    """A worker that waits for its first message; leaving the scope kills what still runs.

    `receive` and `lost` are those of `Connection`. Must be entered on a thread that lives as long
    as the worker is to: the event loop's. The environment goes on without settings of the
    gateway's, which may hold keys. Raises OSError if it cannot be started.
    """
    async with AsyncExitStack() as held:
        ours, theirs = socket.socketpair()
        with theirs:
            connection = await _connect(ours, receive, lost)
            held.callback(connection.close)
            logs, their_logs = os.pipe()
            try:
                relay = await _relay_logs(replica, logs, held)
                # uvloop and asyncio fork on this thread: the death signal follows it, and not one
                # of a pool. It takes a millisecond or two, once per life.
                process = await asyncio.create_subprocess_exec(
                    *_launched([*program, str(theirs.fileno())]),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=their_logs,
                    stderr=their_logs,
                    pass_fds=(theirs.fileno(),),
                    env=_environment(environ),
                    start_new_session=True,  # a Ctrl-C is for the gateway
                )
            finally:
                os.close(their_logs)
        held.push_async_callback(_wait_for_logs, relay)
        held.push_async_callback(_bury, process)
        yield WorkerProcess(process, connection)


async def _connect(
    ours: socket.socket, receive: Callable[[FromWorker], None], lost: Callable[[str], None]
) -> Connection:
    """A connection that owns the socket."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_unix_connection(lambda: Connection(receive, lost), sock=ours)
    return connection


async def _relay_logs(replica: str, logs: int, held: AsyncExitStack) -> LogRelay:
    relay = LogRelay(replica)
    pipe = os.fdopen(logs, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: relay, pipe)
    held.callback(transport.close)
    return relay


async def _wait_for_logs(relay: LogRelay) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_LOGS_S):
            await relay.done.wait()


async def _bury(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _launched(command: list[str]) -> list[str]:
    """The command as one that ends with this process, where the system can do that. Elsewhere the
    end of the socket tells it."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), *command]


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name in _MACHINE_VARIABLES or not name.startswith("FOREBAY_")
    }


def _how(code: int) -> str:
    if code >= 0:
        return f"it ended with code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"
