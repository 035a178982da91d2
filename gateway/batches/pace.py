"""How fast to try a batch's lines while the servers, or a limit, refuse some."""

from __future__ import annotations

_LONGEST_PAUSE_S = 60.0
_REMEMBERED_S = 600.0
_ANY_NUMBER = 1024
"""More than any gateway runs at once."""


class Pace:
    """One batch's pace at one gateway: after a refusal a pause, which doubles with each that
    follows, and then one line; with each that is answered, twice as many. Times are seconds of any
    one clock."""

    def __init__(self, first_pause_s: float) -> None:
        self._first_pause_s = first_pause_s
        self._pause_s = 0.0
        self._until_s = 0.0
        self._most = _ANY_NUMBER

    def allows(self, now_s: float, running: int) -> int:
        """How many more lines to run beside those that do."""
        if now_s < self._until_s:
            return 0
        return max(0, self._most - running)

    def answered(self) -> None:
        """A line was answered."""
        self._pause_s = 0.0
        self._most = min(_ANY_NUMBER, 2 * self._most)

    def refused(self, now_s: float, retry_after_s: float | None) -> float:
        """A line was not answered for now; in how many seconds to try it again."""
        if now_s >= self._until_s:  # of several that ran side by side, the first one counts
            self._pause_s = max(self._first_pause_s, min(_LONGEST_PAUSE_S, 2 * self._pause_s))
            wait_s = max(self._pause_s, min(retry_after_s or 0.0, _LONGEST_PAUSE_S))
            self._until_s = now_s + wait_s
        self._most = 1
        return self._until_s - now_s

    def is_over(self, now_s: float) -> bool:
        """Whether there is nothing left of it to go by."""
        return self._most == _ANY_NUMBER or now_s >= self._until_s + _REMEMBERED_S
