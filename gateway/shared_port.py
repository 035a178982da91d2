"""One port for several processes, each with listening sockets of its own.

The kernel deals new connections out among the sockets that listen (SO_REUSEPORT on Linux: by a hash
of the client's address and port), so that one process's connections are nobody else's, and those of
a process that has ended go to the others at once.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from gateway.listening import PortUnavailable, bind, listen, why_unavailable


@dataclass(frozen=True, slots=True)
class SharedPort:
    """A port on all `addresses` (family and address) of a host."""

    addresses: tuple[tuple[int, str], ...]
    port: int

    @classmethod
    @contextmanager
    def reserved(cls, host: str, port: int) -> Iterator[SharedPort]:
        """The port (0: any free one), ours until the scope ends, also while no process listens.

        Raises PortUnavailable if somebody listens there already, another group of processes that
        share a port included.
        """
        # A shared socket could be bound beside another group's. One that is not cannot.
        alone = listen(host, port)
        names = [(int(listener.family), listener.getsockname()) for listener in alone]
        for listener in alone:
            listener.close()
        found = cls(tuple((family, name[0]) for family, name in names), names[0][1][1])
        with ExitStack() as held:
            try:
                holders = held.enter_context(found.sockets())
            except OSError as error:
                raise PortUnavailable(why_unavailable(host, found.port, error)) from None
            for holder in holders:
                # While none of them listens, this is all that keeps others from the port.
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            yield found

    @contextmanager
    def sockets(self) -> Iterator[list[socket.socket]]:
        """One more set of sockets on the port, to be inherited by the process that is to listen on
        them; closed here at the end of the scope. Raises OSError."""
        with ExitStack() as opened:
            yield [
                opened.enter_context(bind(family, address, self.port, shared=True))
                for family, address in self.addresses
            ]
