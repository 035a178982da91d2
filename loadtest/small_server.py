"""What the servers that stand in for a model's have in common: as little HTTP as clients need.

Requests on a connection are read one after another, and none is checked for more than being HTTP.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import cast

import httptools


class RequestReader(asyncio.Protocol, ABC):
    """One connection. The parser calls the `on_*` methods."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._path = b""
        self._body = bytearray()

    @abstractmethod
    def answer(self, path: bytes, body: bytes | bytearray) -> None:
        """A whole request has come. `body` is overwritten by the next one."""

    @property
    def is_open(self) -> bool:
        """Whether anything can be written."""
        return self._transport is not None

    def write(self, data: bytes) -> None:
        """Send it, if the client is still there."""
        if self._transport is not None:
            self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but ancestry

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._transport = None

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._transport is not None:
                self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._path = url
        self._body.clear()

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        self.answer(self._path, self._body)


async def serve_until_stopped(
    port: int, connection: Callable[[], RequestReader], *, backlog: int
) -> None:
    """Listen on the loopback (port 0: any free one), say at which port on a line of standard
    output, and return at SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with socket.create_server(("127.0.0.1", port), backlog=backlog) as listener:
        server = await loop.create_server(connection, sock=listener)
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        try:
            await stop.wait()
        finally:
            server.close()
