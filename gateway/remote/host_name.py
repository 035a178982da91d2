"""Where a server's name leads, looked up without holding up anybody else's look-up.

An event loop looks names up on a few threads that all of a process shares (two with uvloop). A name
whose name server does not answer holds one for tens of seconds, whoever has stopped waiting for it,
so that two such names would make every server unknown that is not called by its address.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from contextlib import suppress
from ipaddress import ip_address
from threading import Thread


class HostName:
    """One host's. Belongs to the event loop; has a thread of its own while it is looked up."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._is_address = _is_address(host)
        self._looking: asyncio.Future[list[str] | Exception] | None = None

    async def addresses(self) -> list[str]:
        """In the order in which they are to be tried, each once. Raises OSError or UnicodeError
        where there is none.

        A look-up that whoever asked has stopped waiting for goes on, for the next who asks: there
        is one at a time.
        """
        if self._is_address:
            return [self._host]
        if self._looking is None:
            loop = asyncio.get_running_loop()
            looking: asyncio.Future[list[str] | Exception] = loop.create_future()
            # a daemon: nobody's end waits for a name server
            thread = Thread(
                target=self._look_up, args=(loop, looking), name="forebay-names", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                raise OSError(errno.EAGAIN, "no thread left") from error
            self._looking = looking
        found = await asyncio.shield(self._looking)
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return found

    def _look_up(
        self, loop: asyncio.AbstractEventLoop, looking: asyncio.Future[list[str] | Exception]
    ) -> None:
        """On its thread."""
        found: list[str] | Exception
        try:
            known = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            found = list(dict.fromkeys(str(address[0]) for *_, address in known))
        except (OSError, UnicodeError) as error:
            found = _lack_of_files() or error
        with suppress(RuntimeError):  # the loop is closed: nobody wants to know
            loop.call_soon_threadsafe(self._answer, looking, found)

    def _answer(
        self, looking: asyncio.Future[list[str] | Exception], found: list[str] | Exception
    ) -> None:
        self._looking = None
        looking.set_result(found)


def _lack_of_files() -> OSError | None:
    """Why no file can be opened in this process. Without one a look-up fails, and says anything:
    that the name is not known, or a device is busy."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error
    return None


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
