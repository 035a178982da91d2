"""Bytes that have come and wait to be read, a little at a time.

A server writes a token to each of its streams in one burst. If each piece were read as it comes,
the last of two thousand would get its time stamp many milliseconds late. So pieces are stamped
first, all of them, and read afterwards, in slices between which the loop looks for what is new.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

Read = Callable[[float, bytes], None]

_SLICE_S = 0.001


class Backlog:
    """What the connections of one event loop have not read yet, in the order in which it came."""

    def __init__(self, slice_s: float = _SLICE_S) -> None:
        """Reading goes on for `slice_s` before the loop gets its turn."""
        self._slice_s = slice_s
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Read, float, bytes]] = deque()
        self._called = False

    def __len__(self) -> int:
        """How many pieces wait."""
        return len(self._waiting)

    def put(self, read: Read, at_s: float, data: bytes) -> None:
        """Let `read` have a piece and its time stamp soon. It must not raise."""
        self._waiting.append((read, at_s, data))
        if not self._called:
            self._called = True
            self._loop.call_soon(self._read_some)

    def _read_some(self) -> None:
        until_s = time.perf_counter() + self._slice_s
        waiting = self._waiting
        while waiting:
            read, at_s, data = waiting.popleft()
            read(at_s, data)
            if time.perf_counter() > until_s:
                break
        self._called = bool(waiting)
        if waiting:
            self._loop.call_soon(self._read_some)
