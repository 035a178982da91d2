"""Connections that wait for a request, and as many more as are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from loadtest.wire.backlog import Backlog
from loadtest.wire.connection import Connection, Endpoint, ExchangeError

_AT_ONCE = 64
"""Handshakes at a time: more may not fit a server's queue of new connections."""


class Pool:
    """Connections to one server. There is no limit to how many are in use; all are read from one
    backlog. Closed with its scope, which must outlive every use."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._backlog = Backlog()
        self._free: list[Connection] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._free:
            connection.close()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """One that nobody else has: the last that was given back, since a server closes those that
        have been idle for long."""
        connection = self._free.pop() if self._free else self._new()
        try:
            yield connection
        finally:
            self._free.append(connection)

    async def open(self, count: int, timeout_s: float) -> None:
        """Have so many open that can be opened: what cannot will be tried again when needed."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def open_one() -> None:
            connection = self._new()
            async with gate:
                with suppress(ExchangeError):
                    await connection.open(timeout_s)
            self._free.append(connection)

        async with asyncio.TaskGroup() as opening:
            for _ in range(count - len(self._free)):
                opening.create_task(open_one())

    def _new(self) -> Connection:
        return Connection(self._endpoint, self._backlog)
