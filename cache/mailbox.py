"""From other threads to the one that owns the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Mailbox:
    """Callbacks that other threads leave and the owner runs. `wake` is called after each post, on
    the posting thread, and must get the owner to call `deliver` soon."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._letters: deque[Callable[[], None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._letters)

    def post(self, letter: Callable[[], None]) -> None:
        """Have the owner run `letter`. From any thread."""
        self._letters.append(letter)
        self._wake()

    def deliver(self) -> None:
        """Run what has come, in order. Owner only."""
        for _ in range(len(self._letters)):
            self._letters.popleft()()
