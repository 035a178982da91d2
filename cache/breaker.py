"""When to stop asking a server that does not answer, and when to ask again. Time is an argument."""

from __future__ import annotations

from enum import StrEnum


class BreakerState(StrEnum):
    """`CLOSED`: ask. `OPEN`: do not. `PROBING`: do not; one probe is under way."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """Opens after `failures` in a row, or at once after a stall (a wait as long as a timeout).

    While open, one probe at a time may go out, the first after `first_retry_s`, each later one
    after twice the wait before, up to `last_retry_s`. A probe that is answered closes it. Answers
    of questions asked before it opened change nothing: only a probe can close it. With
    `starts_open` the first probe is due at once.
    """

    def __init__(
        self,
        failures: int = 3,
        first_retry_s: float = 0.5,
        last_retry_s: float = 10.0,
        *,
        starts_open: bool = False,
    ) -> None:
        self._failures_to_open = failures
        self._first_retry_s = first_retry_s
        self._last_retry_s = last_retry_s
        self._enter(BreakerState.OPEN if starts_open else BreakerState.CLOSED)
        self._failures = 0
        self._retry_s = first_retry_s
        self._retry_at_s = float("-inf")
        self.opened = 0

    @property
    def state(self) -> BreakerState:
        return self._state

    def success(self) -> None:
        """A question was answered in time."""
        if self.closed:
            self._failures = 0

    def failure(self, now_s: float) -> None:
        """A question failed fast: refused, reset, denied."""
        if self.closed:
            self._failures += 1
            if self._failures >= self._failures_to_open:
                self._open(now_s)

    def stall(self, now_s: float) -> None:
        """A question waited a whole timeout for nothing."""
        if self.closed:
            self._open(now_s)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until a probe may start, or None if closed or probing."""
        if self._state is not BreakerState.OPEN:
            return None
        return max(0.0, self._retry_at_s - now_s)

    def start_probe(self, now_s: float) -> bool:
        """Whether the caller is to send the one probe now; it must report how it ended."""
        if self._state is not BreakerState.OPEN or now_s < self._retry_at_s:
            return False
        self._enter(BreakerState.PROBING)
        return True

    def probe_succeeded(self) -> None:
        if self._state is BreakerState.PROBING:
            self._enter(BreakerState.CLOSED)
            self._failures = 0
            self._retry_s = self._first_retry_s

    def probe_failed(self, now_s: float) -> None:
        if self._state is BreakerState.PROBING:
            self._enter(BreakerState.OPEN)
            self._retry_s = min(self._retry_s * 2, self._last_retry_s)
            self._retry_at_s = now_s + self._retry_s

    def _open(self, now_s: float) -> None:
        self._enter(BreakerState.OPEN)
        self._retry_s = self._first_retry_s
        self._retry_at_s = now_s + self._retry_s
        self.opened += 1

    def _enter(self, state: BreakerState) -> None:
        self._state = state
        self.closed = state is BreakerState.CLOSED
        """Whether questions may be asked. For reading: it is asked for very often."""
