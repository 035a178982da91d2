"""Beginning and ending a background task."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

_log = structlog.get_logger("forebay.server")


def begin_task(chore: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
    """A task that says so in the log, once, if it breaks down; `what` is what it does."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            _log.error("a background task broke down", what=what, exc_info=failure)

    task = asyncio.create_task(chore, name=what)
    task.add_done_callback(ended)
    return task


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel it and wait until it has ended, however it does."""
    task.cancel()
    await asyncio.wait([task])
