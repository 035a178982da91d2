"""Installing a peer, once."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtest.peers.peer import Peer
from loadtest.peers.place import PeerError, Place
from loadtest.peers.workshop import Tell, Workshop


def install(peer: Peer, root: Path, tell: Tell) -> Place:
    """Build the peer in its directory under `root`; nothing happens if that is done already.

    After a failure or an interruption another call goes on where this one stopped. Raises
    PeerError, also if another installation of the same peer is going on.
    """
    place = place_of(peer, root)
    if place.installed == peer.recipe:
        tell(f"{peer.name} is installed in {place.root}")
        return place
    with _alone(place):
        place.unmark()
        peer.install(Workshop(place, tell))
        place.mark_installed(peer.recipe)
    tell(f"{peer.name} is now installed in {place.root}")
    return place


def installed(peer: Peer, root: Path) -> Place:
    """Where it is. Raises PeerError, with the command that installs it, if it is not there."""
    place = place_of(peer, root)
    if place.installed == peer.recipe:
        return place
    what = "not installed" if place.installed is None else "of another version"
    raise PeerError(
        f"{peer.name} is {what} in {place.root}; run: python -m loadtest.peers install "
        f"{peer.name} --into {root}"
    )


def place_of(peer: Peer, root: Path) -> Place:
    """Absolute, because builds and environments remember where they were made."""
    return Place(root.resolve() / peer.home)


@contextmanager
def _alone(place: Place) -> Iterator[None]:
    try:
        place.root.mkdir(parents=True, exist_ok=True)
        lock = (place.root / "lock").open("wb")
    except OSError as error:
        raise PeerError(f"{place.root}: {error.strerror}; choose another --into") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PeerError(f"{place.root}: another installation is going on there") from None
        yield
