"""Which of a publisher's numbered messages is the next one, and which are missing."""

from __future__ import annotations

from enum import Enum, auto


class Arrival(Enum):
    """What a message is, going by its number."""

    NEXT = auto()
    """It follows the last one, or is the first."""
    KNOWN = auto()
    """It has been taken already: it was asked for before it came by itself."""
    LATER = auto()
    """Others before it are missing."""
    RESTARTED = auto()
    """The publisher has begun to count again."""


class Arrivals:
    """One life of a publisher that numbers its messages without gaps."""

    def __init__(self) -> None:
        self.taken: int | None = None
        """The number of the last message that was taken in, None before the first."""
        self._published: int | None = None

    def published(self, number: int) -> Arrival:
        """A message has come by itself. These come in order, so that one which does not grow says
        that the publisher was started again; it belongs to a life of its own then."""
        if self._published is not None and number <= self._published:
            return Arrival.RESTARTED
        self._published = number
        return self.of(number)

    def of(self, number: int) -> Arrival:
        """What a message with this number is, also one that was asked for."""
        if self.taken is None or number == self.taken + 1:
            return Arrival.NEXT
        return Arrival.KNOWN if number <= self.taken else Arrival.LATER

    def take(self, number: int) -> None:
        """It is taken in; what is missing before it is given up."""
        self.taken = number
