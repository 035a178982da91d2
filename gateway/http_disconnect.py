"""Notices that the client has gone, whatever the request is doing at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.http_call import ClientDisconnectedError, HttpCall


class Interruption:
    """Cancels the task that it was made in, for a reason that the task can tell from others."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("an interruption needs a running task")
        self._task = task
        self._cancelling_before = task.cancelling()
        self._fired = False

    def fire(self) -> None:
        """Cancel the task, once."""
        if not self._fired:
            self._fired = True
            self._task.cancel()

    def absorbs_cancellation(self) -> bool:
        """Whether a CancelledError that has arrived is this interruption's alone."""
        return self._fired and self._task.uncancel() <= self._cancelling_before


@asynccontextmanager
async def ends_with_client(call: HttpCall) -> AsyncIterator[None]:
    """Run the block until it is done or the client is gone; then ClientDisconnectedError leaves it.

    The body must have been read: from here on the connection has nothing more to say. A client that
    closes only its sending half counts as gone, which is what makes a reset seen at once.
    """
    interruption = Interruption()

    async def watch() -> None:
        while (await call.receive())["type"] != "http.disconnect":
            pass
        interruption.fire()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if interruption.absorbs_cancellation():
            raise ClientDisconnectedError from None
        raise
    finally:
        watcher.cancel()
