"""Ending a background task."""

from __future__ import annotations

import asyncio


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel it and wait until it has ended, however it does."""
    task.cancel()
    await asyncio.wait([task])
