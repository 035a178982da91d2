"""Notices that the client has gone, whatever the request is doing at that moment."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from gateway.client_link import ClientLink
from gateway.http_call import ClientDisconnectedError, HttpCall


class Interruption:
    """Cancels a task for a reason that the task can tell from others."""

    def __init__(self, task: asyncio.Task[Any] | None = None) -> None:
        """`task` is the one to cancel; None: the one that this is made in."""
        task = task or asyncio.current_task()
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


class ends_with_client:  # noqa: N801 - it is used as a statement
    """Run the block until it is done or the client is gone; then ClientDisconnectedError leaves it.

    The body must have been read: from here on the connection has nothing more to say. A client that
    closes only its sending half counts as gone, which is what makes a reset seen at once. Who has
    been sent the whole answer has got it, and may go.
    """

    __slots__ = ("_call", "_interruption", "_link", "_watcher")

    def __init__(self, call: HttpCall) -> None:
        self._call = call
        self._link: ClientLink | None = call.link
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._interruption = Interruption()
        if self._link is not None:
            self._link.listen(self._client_gone)
        else:
            self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._link is not None:
            self._link.forget(self._client_gone)
        if self._watcher is not None:
            self._watcher.cancel()
        if kind is asyncio.CancelledError and self._interruption.absorbs_cancellation():
            raise ClientDisconnectedError from None

    async def _watch(self) -> None:
        while (await self._call.receive())["type"] != "http.disconnect":
            pass
        self._client_gone()

    def _client_gone(self) -> None:
        if not self._call.response_complete:
            self._interruption.fire()
