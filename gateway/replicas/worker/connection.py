"""The gateway's end of a worker's socket, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from gateway.replicas.worker.frames import BadFrame, from_worker, to_frame
from gateway.replicas.worker.messages import FromWorker, ToWorker

_HIGH_WATER_BYTES = 1 << 20
"""What may wait to be written before new requests wait too: some prompts of a hundred thousand
tokens."""


class Connection(asyncio.Protocol):
    """Messages out, without ever blocking the loop; messages in, several per wake-up.

    `receive` is called for each message; `lost` once, with the reason, when nothing will come any
    more.
    """

    def __init__(self, receive: Callable[[FromWorker], None], lost: Callable[[str], None]) -> None:
        self._receive = receive
        self._lost = lost
        self._frames = from_worker()
        self._transport: asyncio.Transport | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._over = False

    def send(self, message: ToWorker) -> None:
        """Write it, or what of it the socket takes, and the rest when it takes more. Goes nowhere
        once the worker is lost."""
        if self._transport is not None and not self._over:
            self._transport.write(to_frame(message))

    async def writable(self) -> None:
        """Wait until the worker has read most of what was sent, or is lost."""
        await self._may_write.wait()

    def close(self) -> None:
        """Cut the connection. Idempotent."""
        if self._transport is not None:
            self._transport.abort()
        self._end("the connection was closed")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        try:
            messages = self._frames.feed(data)
        except BadFrame as error:
            self._end(f"it cannot be understood: {error}")
            self.close()
            return
        for message in messages:
            self._receive(message)

    def connection_lost(self, _error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._end("its connection broke")

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        if not self._over:
            self._may_write.clear()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._may_write.set()

    def _end(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self._may_write.set()
            self._lost(reason)
