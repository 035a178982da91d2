"""Which of several processes on one directory runs the server that all of them use."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.settings_errors import ConfigError


@dataclass(frozen=True, slots=True)
class InstanceLock:
    """An open lock file. The lock belongs to the open file: a child that inherits `descriptor`
    holds it too, until both have ended. The file itself stays, for its name is what is agreed on.
    """

    path: Path
    descriptor: int

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[InstanceLock]:
        """The file, made if it is not there; closed, and the lock let go, at the end of the scope.
        Raises ConfigError."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError([f"{path}: cannot be opened ({error.strerror})"]) from None
        try:
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    def taken(self) -> bool:
        """Take the lock if nobody holds it; whether it is ours. Raises ConfigError where the file
        system knows no locks."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConfigError([f"{self.path}: cannot be locked ({error.strerror})"]) from None
        return True

    def announce(self, socket_path: Path) -> None:
        """As its holder: say who we are and where the server listens."""
        content = f"{os.getpid()}\n".encode() + os.fsencode(socket_path) + b"\n"
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, content, 0)

    def holder(self) -> tuple[int, Path] | None:
        """What the holder, or the last one, announced: its process id and the server's socket.
        None before it has."""
        pid, _, socket_path = os.pread(self.descriptor, 4096, 0).partition(b"\n")
        if not pid.isdigit() or not socket_path.endswith(b"\n"):
            return None
        return int(pid), Path(os.fsdecode(socket_path[:-1]))
