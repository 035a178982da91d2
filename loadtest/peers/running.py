"""A peer that runs: started for a measurement, stopped after it."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from loadtest.forebay_server import MODEL, free_port
from loadtest.peers.catalog import ENGINES, ROUTERS, peer_named
from loadtest.peers.install import installed
from loadtest.peers.peer import HOST, EnginePeer, Launch, RouterPeer, usable_cores
from loadtest.peers.place import PeerError, Place, default_root
from loadtest.peers.process_group import process_group, tail
from loadtest.peers.weights import bundled_gguf
from loadtest.peers.workshop import Tell, Workshop
from loadtest.target import Target
from loadtest.wire.connection import Endpoint, ExchangeError, fetch

_POLL_S = 0.1
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class RunningPeer:
    """A ready server; it goes when the scope that made it ends. `start_s` is how long it took."""

    target: Target
    process: subprocess.Popen[bytes]
    start_s: float

    @property
    def pid(self) -> int:
        """The root of its processes."""
        return self.process.pid

    async def ended(self) -> int:
        """Wait until it ends by itself; its exit code."""
        # Should this be cancelled, the thread's wait is over when the scope has ended the process.
        return await asyncio.to_thread(self.process.wait)


def check_engine(name: str) -> None:
    """Raises PeerError if no engine of this name is installed where peers usually are."""
    if name not in ENGINES:
        peer_named(name)  # raises if it is nothing at all
        raise PeerError(f"{name} is a router and needs upstreams: it is nothing to measure alone")
    installed(ENGINES[name], default_root())


@asynccontextmanager
async def running_peer(
    name: str,
    *,
    model_path: Path | None = None,
    threads: int | None = None,
    key: str | None = None,
    upstreams: Sequence[Endpoint] = (),
    port: int | None = None,
    root: Path | None = None,
    to_terminal: bool = False,
    tell: Tell,
) -> AsyncIterator[RunningPeer]:
    """An installed peer on 127.0.0.1 until the end of the scope.

    An engine serves `model_path` (the bundled model's file by default) under the name of forebay's
    own model, with as many threads as there are usable cores unless `threads` says otherwise, to
    whoever has `key` (None: to everybody on this machine). A router stands before `upstreams`,
    which answer GET /health and all have the same key; it passes on the client's. What one kind
    has no use for is refused. `port` is any free one by default, `root` where peers are installed.
    What the server says goes to a log that is quoted if it fails, or to the terminal. The first
    start with a model blocks while the model is converted, if the engine wants another form of it.

    Raises PeerError if the peer is not installed, ends early or is not ready in time.
    """
    root, port = root or default_root(), port or free_port()
    if name in ENGINES:
        if upstreams:
            raise PeerError(f"{name} is an engine and stands before nobody: no upstreams")
        launch = _engine_launch(ENGINES[name], root, model_path, threads, port, key, tell)
    elif name in ROUTERS:
        if model_path is not None or threads is not None or key is not None:
            raise PeerError(f"{name} is a router: it has no model, threads or key of its own")
        launch = _router_launch(ROUTERS[name], root, upstreams, port)
        key = _common_key(name, upstreams)
    else:
        peer_named(name)  # raises: it is neither
        raise AssertionError("every peer is an engine or a router")
    endpoint = Endpoint(HOST, port, "/v1", key=key)
    async with started(name, launch, endpoint, to_terminal=to_terminal) as running:
        yield running


@asynccontextmanager
async def started(
    name: str, launch: Launch, endpoint: Endpoint, *, to_terminal: bool, stop_s: float = _STOP_S
) -> AsyncIterator[RunningPeer]:
    """The process of a launch, yielded when it is ready at `endpoint`; its whole group is ended
    with the scope. Raises PeerError."""
    began_s = time.monotonic()
    with ExitStack() as scope:
        log, output = scope.enter_context(_log(to_terminal))
        group = process_group(
            launch.command, environment=launch.environment, output=output, stop_s=stop_s
        )
        try:
            process = scope.enter_context(group)
        except OSError as error:
            why = f"{launch.command[0]}: {error.strerror}"
            raise PeerError(f"{name} cannot be started ({why}); install it again") from None
        await _until_ready(name, launch, endpoint, process, log)
        yield RunningPeer(Target(name, endpoint, MODEL), process, time.monotonic() - began_s)


def _engine_launch(
    peer: EnginePeer,
    root: Path,
    model_path: Path | None,
    threads: int | None,
    port: int,
    key: str | None,
    tell: Tell,
) -> Launch:
    place = installed(peer, root)
    model = peer.prepare(Workshop(place, tell), model_path or bundled_gguf())
    threads = threads or len(usable_cores())
    return peer.launch(place, model=model, served_as=MODEL, threads=threads, port=port, key=key)


def _router_launch(
    peer: RouterPeer, root: Path, upstreams: Sequence[Endpoint], port: int
) -> Launch:
    if not upstreams:
        raise PeerError(f"{peer.name} is a router and needs upstreams")
    place: Place = installed(peer, root)
    return peer.launch(place, upstreams=upstreams, port=port, metrics_port=free_port())


def _common_key(name: str, upstreams: Sequence[Endpoint]) -> str | None:
    """What a client of the router has to send, who passes it on as it is."""
    keys = {at.key for at in upstreams}
    if len(keys) > 1:
        raise PeerError(f"{name} passes on the client's key, but its upstreams want several")
    return keys.pop()


@contextmanager
def _log(to_terminal: bool) -> Iterator[tuple[Path | None, IO[bytes] | None]]:
    """Where a server's words go, and where they can be read again."""
    if to_terminal:
        yield None, None
        return
    with tempfile.TemporaryDirectory(prefix="forebay-peer-") as directory:
        path = Path(directory) / "log"
        with path.open("wb") as output:
            yield path, output


async def _until_ready(
    name: str,
    launch: Launch,
    endpoint: Endpoint,
    process: subprocess.Popen[bytes],
    log: Path | None,
) -> None:
    deadline_s = time.monotonic() + launch.ready_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        if (code := process.poll()) is not None:
            raise PeerError(f"{name} ended with code {code}{_end_of(log)}")
        # Until it listens, there is nobody to answer.
        with suppress(ExchangeError):
            if (await fetch(endpoint, "GET", launch.ready_path, min(left_s, 5.0))).status == 200:
                return
        await asyncio.sleep(_POLL_S)
    raise PeerError(f"{name} was not ready within {launch.ready_s:g} s{_end_of(log)}")


def _end_of(log: Path | None) -> str:
    return "" if log is None else tail(log)
