"""The directory where forebay keeps what it makes for itself: the server secret, the demo key,
the operator's key."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gateway.settings_errors import ConfigError

_SECRET_FILE = "server-secret"
_DEMO_KEY_FILE = "demo-key"
_ADMIN_KEY_FILE = "admin-key"
KEY_PREFIX = "sk-forebay-"


def new_key() -> str:
    """A fresh API key with 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class StateDir:
    """An existing directory into which only its owner, who runs forebay, can write."""

    path: Path

    @staticmethod
    def locate(environ: Mapping[str, str]) -> Path:
        """FOREBAY_STATE_DIR, else XDG_STATE_HOME/forebay, else ~/.local/state/forebay. Raises
        ConfigError where that is in a home directory which is not known."""
        try:
            if chosen := environ.get("FOREBAY_STATE_DIR"):
                return Path(chosen).expanduser().absolute()
            # The XDG specification says that a relative path there is to be ignored.
            if (base := environ.get("XDG_STATE_HOME", "")) and Path(base).is_absolute():
                return Path(base) / "forebay"
            return Path(environ.get("HOME") or Path.home()) / ".local" / "state" / "forebay"
        except RuntimeError:
            raise ConfigError(
                ["FOREBAY_STATE_DIR: is in a home directory that is not known; name it in full"]
            ) from None

    @classmethod
    def open(cls, environ: Mapping[str, str]) -> StateDir:
        """The directory, made if it is not there. Raises ConfigError if it cannot be, and where
        others could have put a secret of their choice into it."""
        path = cls.locate(environ)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.stat()
        except OSError as error:
            raise ConfigError(
                [f"FOREBAY_STATE_DIR: {path} cannot be made ({error.strerror})"]
            ) from None
        if status.st_uid != os.geteuid():
            raise ConfigError(
                [
                    f"FOREBAY_STATE_DIR: {path} belongs to user {status.st_uid}, who can read and "
                    f"choose the secrets in it: chown it to user {os.geteuid()}, as whom forebay "
                    "runs, or name another"
                ]
            )
        if status.st_mode & 0o022:
            raise ConfigError(
                [
                    f"FOREBAY_STATE_DIR: others can write to {path}, and so choose the secrets in "
                    f"it: chmod go-w {path}"
                ]
            )
        return cls(path)

    def private_directory(self, name: str) -> Path:
        """The directory of this name in it, which only its owner may enter. Raises ConfigError."""
        path = self.path / name
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            path.chmod(0o700)
        except OSError as error:
            raise ConfigError([f"{path}: cannot be made ({error.strerror})"]) from None
        return path

    def server_secret(self) -> bytes:
        """The secret under which prompts are hashed, made once. Raises ConfigError."""
        return self._made_once(_SECRET_FILE, lambda: secrets.token_hex(32)).encode()

    def demo_key(self) -> str:
        """The demo tenant's key, made once. Raises ConfigError."""
        return self._made_once(_DEMO_KEY_FILE, new_key)

    def existing_demo_key(self) -> str | None:
        """The demo tenant's key if there is one."""
        return self._existing(_DEMO_KEY_FILE)

    def admin_key(self) -> str:
        """The operator's key where none is configured, made once. Raises ConfigError."""
        return self._made_once(_ADMIN_KEY_FILE, new_key)

    def existing_admin_key(self) -> str | None:
        """The operator's key if one was made here."""
        return self._existing(_ADMIN_KEY_FILE)

    def _existing(self, name: str) -> str | None:
        try:
            return (self.path / name).read_text().strip() or None
        except (OSError, UnicodeDecodeError):
            return None

    def _made_once(self, name: str, make: Callable[[], str]) -> str:
        """The file's content: written by whoever comes first, whole or not at all, mode 0600.

        Two processes may start at once. Each writes a file of its own and links it to the name,
        which succeeds for one of them only; both then read the winner's.
        """
        path = self.path / name
        try:
            if not path.exists():
                draft = self.path / f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
                descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                try:
                    with os.fdopen(descriptor, "w") as file:
                        file.write(make() + "\n")
                        file.flush()
                        os.fsync(file.fileno())
                    with suppress(FileExistsError):
                        os.link(draft, path)
                finally:
                    draft.unlink()
            content = path.read_text().strip()
        except OSError as error:
            raise ConfigError([f"{path}: cannot be made or read ({error.strerror})"]) from None
        except UnicodeDecodeError:
            raise ConfigError(
                [f"{path}: is damaged; restore it, or delete it to have it made anew"]
            ) from None
        if not content:
            raise ConfigError([f"{path}: is empty; delete it to have it made anew"])
        return content
