"""What the measurement knows of another server: how to install it and how to start it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from loadtest.peers.place import Place
from loadtest.peers.workshop import Workshop
from loadtest.wire.connection import Endpoint

HOST = "127.0.0.1"
"""Where every peer listens: nobody but this machine is to be served."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line that starts a server, and how one knows that it serves.

    `environment` comes on top of ours and may hold the server's key, which everybody could read on
    a command line. The server answers `ready_path` with 200 within `ready_s` or is given up.
    """

    command: tuple[str, ...]
    ready_path: str
    ready_s: float
    environment: dict[str, str] = field(default_factory=dict, repr=False)


class Peer(Protocol):
    """A server that can be installed.

    `name` is what commands and tables call it; `home` names its directory, which variants of one
    server share; an installation by another `recipe` is out of date.
    """

    @property
    def name(self) -> str: ...

    @property
    def home(self) -> str: ...

    @property
    def recipe(self) -> str: ...

    def install(self, workshop: Workshop) -> None:
        """Build everything in the workshop's place; what is there already may be kept. Raises
        PeerError."""
        ...


class EnginePeer(Peer, Protocol):
    """A server that runs a model."""

    def prepare(self, workshop: Workshop, model: Path) -> Path:
        """The model as this engine reads it, made in the workshop's place unless it is there.
        `model` is a GGUF file, or what the engine reads already. Raises PeerError."""
        ...

    def launch(
        self, place: Place, *, model: Path, served_as: str, threads: int, port: int, key: str | None
    ) -> Launch:
        """The command that serves a prepared model under the name `served_as` with so many
        threads; `key` None leaves it open."""
        ...


class RouterPeer(Peer, Protocol):
    """A server that stands in front of others."""

    def launch(
        self, place: Place, *, upstreams: Sequence[Endpoint], port: int, metrics_port: int
    ) -> Launch:
        """The command that spreads requests over `upstreams`, which get the client's key, and have
        to answer GET /health: no router starts before they do."""
        ...


def usable_cores() -> list[int]:
    """The ids of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
