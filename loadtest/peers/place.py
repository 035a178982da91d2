"""Where peers are installed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.campaign import CampaignError


class PeerError(CampaignError):
    """A peer that cannot be installed or started; its text says why and what to do next."""


@dataclass(frozen=True, slots=True)
class Place:
    """One peer's own directory. Nothing of it lies elsewhere: to remove a peer, delete it."""

    root: Path

    @property
    def venv(self) -> Path:
        """A virtual environment of its own: peers pin what others pin differently."""
        return self.root / "venv"

    @property
    def log(self) -> Path:
        """What the commands of an installation said."""
        return self.root / "install.log"

    @property
    def site_packages(self) -> Path:
        """Where the environment keeps its packages. Raises PeerError if there is none."""
        for found in sorted(self.venv.glob("lib/python3*/site-packages")):
            return found
        raise PeerError(f"{self.venv}: not a virtual environment; delete it and install again")

    def executable(self, name: str) -> Path:
        """A command of the environment."""
        return self.venv / "bin" / name

    @property
    def installed(self) -> str | None:
        """The recipe by which the last whole installation was made; None before the first."""
        try:
            return self._mark.read_text()
        except FileNotFoundError:
            return None

    def mark_installed(self, recipe: str) -> None:
        """To be called last, so that half an installation never passes for a whole one."""
        self._mark.write_text(recipe)

    def unmark(self) -> None:
        """Forget what was installed: it is about to change."""
        self._mark.unlink(missing_ok=True)

    @property
    def _mark(self) -> Path:
        return self.root / "installed"


def default_root() -> Path:
    """`peers` in FOREBAY_CACHE_DIR, else in $XDG_CACHE_HOME/forebay, else in ~/.cache/forebay."""
    own = os.environ.get("FOREBAY_CACHE_DIR")
    if own:
        return Path(own) / "peers"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "forebay" / "peers"
