"""Stop strings in streamed text: found across any chunk boundary, shown to nobody."""

from __future__ import annotations

import re
from collections.abc import Iterable


class StopMatcher:
    """Watches one text for the first occurrence of any stop string.

    The first is the one that starts earliest in the whole text (the shortest of several at one
    place), however the text is cut into chunks. Text is held back only while it could be the
    beginning of a stop string, so never more than `len(longest stop) - 1` characters.

    `matched` is the stop string that was found, None so far. Nothing may be fed after a match.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Raises ValueError for an empty stop string."""
        self._stops = sorted(set(stops), key=len)
        if "" in self._stops:
            raise ValueError("a stop string must not be empty")
        self._pattern = re.compile("|".join(map(re.escape, self._stops)) or "(?!)")
        self._first_letters = frozenset(stop[0] for stop in self._stops)
        self._most_held = max(map(len, self._stops), default=1) - 1
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown now, the stop string if this text settles on one)."""
        if not self._stops:
            return text, None
        text = self._held + text
        beginning = self._possible_beginning(text)
        match = self._pattern.search(text)
        # A match that starts after a possible beginning must wait: the beginning may yet become
        # an earlier occurrence.
        if match and match.start() <= beginning:
            return self._settle(text, match), self.matched
        self._held = text[beginning:]
        return text[:beginning], None

    def flush(self) -> str:
        """The end of the text: what was held back, up to a stop string inside it if there is one
        (`matched` says so)."""
        held, self._held = self._held, ""
        match = self._pattern.search(held)
        return self._settle(held, match) if match else held

    def _settle(self, text: str, match: re.Match[str]) -> str:
        self._held, self.matched = "", match[0]
        return text[: match.start()]

    def _possible_beginning(self, text: str) -> int:
        """Where the longest end of `text` begins that some stop string starts with and goes on
        beyond; the text's length if there is none."""
        for start in range(max(0, len(text) - self._most_held), len(text)):
            if text[start] in self._first_letters:
                end = text[start:]
                if any(len(stop) > len(end) and stop.startswith(end) for stop in self._stops):
                    return start
        return len(text)
