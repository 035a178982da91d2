"""What one tier holds where a block can lie in it several times."""

from __future__ import annotations

from collections.abc import Collection

from cache.journal import TierChanges


class HeldLinks:
    """Counts copies by link; what comes first and what goes last is written down in a journal."""

    __slots__ = ("_copies", "_journal")

    def __init__(self, journal: TierChanges) -> None:
        """Nothing is held, and the journal knows that."""
        self._journal = journal
        self._copies: dict[bytes, int] = {}

    def links(self) -> Collection[bytes]:
        """Of all that is held; changes with it."""
        return self._copies.keys()

    def add(self, link: bytes) -> None:
        """One copy more."""
        copies = self._copies.get(link, 0)
        if not copies:
            self._journal.stored(link)
        self._copies[link] = copies + 1

    def remove(self, link: bytes, copies: int = 1) -> None:
        """So many copies less. Raises KeyError for a link that is not held."""
        left = self._copies[link] - copies
        if left:
            self._copies[link] = left
        else:
            del self._copies[link]
            self._journal.removed(link)
