"""What the HTTP server knows of a connection, for who need not wait for ASGI's `receive`."""

from __future__ import annotations

from collections.abc import Callable

from gateway.rounds import Rounds

LINK = "forebay.link"
"""Where in a request's scope our own server puts it; others do not."""


class ClientLink:
    """One connection. Belongs to the event loop.

    Its protocol says when it is `lost`, and whether all of the newest request has come, and with
    it all of those before it.
    """

    __slots__ = ("_gone", "_listeners", "_read_on", "request_is_whole", "rounds")

    def __init__(self, read_on: Callable[[], None]) -> None:
        """`read_on` has the connection read from, or nobody would see its end."""
        self._read_on = read_on
        self._listeners: set[Callable[[], None]] = set()
        self._gone = False
        self.request_is_whole = False
        self.rounds = Rounds(linger=True)
        """For who streams to the client, one stream after another."""

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this when the client goes; at once if it has gone."""
        if self._gone:
            listener()
        else:
            self._listeners.add(listener)
            self._read_on()

    def forget(self, listener: Callable[[], None]) -> None:
        """Do not call it any more."""
        self._listeners.discard(listener)

    def lost(self) -> None:
        """The connection is no more."""
        self._gone = True
        self.rounds.stop()
        for listener in tuple(self._listeners):
            listener()
