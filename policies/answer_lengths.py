"""How long answers usually are."""

from __future__ import annotations

_REMEMBERED = 50


class AnswerLengths:
    """A mean of lengths in tokens, of which about the last 50 count.

    `tokens` is that mean, in whole tokens and at least one; 0 before there is any.
    """

    __slots__ = ("_count", "_mean", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self._mean = 0.0
        self._count = 0

    def add(self, tokens: int) -> None:
        """One more answer, which had so many."""
        self._count = min(self._count + 1, _REMEMBERED)
        self._mean += (tokens - self._mean) / self._count
        self.tokens = max(1, round(self._mean))
