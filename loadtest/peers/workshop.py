"""The tools of an installation: an environment, pip, and commands whose words go to a log."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from loadtest.peers.place import PeerError, Place
from loadtest.peers.process_group import process_group, tail

Tell = Callable[[str], None]

_STOP_S = 5.0


class Workshop:
    """Builds what lies in one place. `tell` gets a line before everything that takes long.

    Every method raises PeerError with the end of the log if a command fails. Which registry pip
    asks is the user's configuration, as with any other package.
    """

    def __init__(self, place: Place, tell: Tell, python: str = sys.executable) -> None:
        self.place = place
        self.tell = tell
        self._python = python

    def make_venv(self) -> None:
        """An environment with pip, of the Python that runs us; left as it is if there is one."""
        venv, pip = self.place.venv, self.place.executable("pip")
        if pip.exists():
            return
        self.tell(f"making {venv}")
        try:
            self.run([self._python, "-m", "venv", "--clear", venv])
        except PeerError:
            # Debian's Python has a venv module without the pip that it wants to put there.
            self.run([self._python, "-m", "venv", "--clear", "--without-pip", venv])
            python = self.place.executable("python")
            self.run([self._python, "-m", "pip", "--python", python, "install", "pip"])

    def pip(self, *arguments: str | Path, hint: str = "") -> None:
        """One command of the environment's pip. A failure ends with `hint`, if there is one."""
        self.tell(f"pip {' '.join(map(str, arguments))}")
        python = self.place.executable("python")
        try:
            self.run([python, "-m", "pip", "--disable-pip-version-check", *arguments])
        except PeerError as error:
            raise PeerError(f"{error}\n{hint}" if hint else str(error)) from None

    def compile(self, what: str, command: Sequence[str | Path], *, directory: Path) -> None:
        """A build command, with the environment's tools before those of the machine."""
        self.tell(what)
        path = f"{self.place.venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        self.run(command, environment={"PATH": path}, directory=directory)

    def require(self, *programs: str, hint: str) -> None:
        """One of these programs has to be there; `hint` says how to get it."""
        if not any(shutil.which(program) for program in programs):
            raise PeerError(f"none of {', '.join(programs)} is on the path: {hint}")

    def run(
        self,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        """Any other command, to its end."""
        self.place.root.mkdir(parents=True, exist_ok=True)
        with self.place.log.open("ab") as log:
            log.write(f"$ {' '.join(map(str, command))}\n".encode())
            log.flush()
            try:
                with process_group(
                    command,
                    environment=environment or {},
                    output=log,
                    stop_s=_STOP_S,
                    directory=directory,
                ) as process:
                    code = process.wait()
            except OSError as error:
                raise PeerError(f"{command[0]}: {error.strerror}") from None
        if code:
            line = " ".join(map(str, command))
            raise PeerError(
                f"`{line}` ended with code {code}{tail(self.place.log)}\n"
                f"All of it is in {self.place.log}; install again to go on from there."
            )
