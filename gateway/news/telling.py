"""What a gateway has to tell of its decisions, cut down to what the others do not know yet.

Prompts of one replica share beginnings, so a decision names the last link that was told of it and
gives only the links behind: what crosses Redis grows with new text, not with the prompts' length.
All that may be left out was told in the same *generation*, which ends after `GENERATION_S`, after
`MOST_TOLD_LINKS`, and when a message may have been lost. So whoever listens from some point on
understands everything from the next generation on, and both sides remember a bounded number of
links.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from gateway.news.messages import MOST_LINKS, Decision, RoutedNews

GENERATION_S = 30.0
MOST_TOLD_LINKS = 65_536
"""Of one generation, all replicas together; a longer prompt is told up to there."""

_MOST_WAITING = 4_096
_MOST_WAITING_LINKS = 131_072
_MOST_DECISIONS = 16  # in a message: who hears it does so in one turn of its event loop
_MOST_MESSAGES = 16  # taken at once, in one turn of this one's


class Telling:
    """The decisions that wait to be told and what was told already. Time is an argument."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Sequence[bytes]]] = deque()
        self._waiting_links = 0
        self._told: dict[str, set[bytes]] = {}
        self._told_links = 0
        self._generation = 0
        self._begun_s = 0.0
        self.told = 0
        self.dropped = 0

    @property
    def waiting(self) -> int:
        """How many decisions were not taken yet."""
        return len(self._waiting)

    def add(self, replica: str, links: Sequence[bytes]) -> None:
        """A decision to tell. Keeps the links, at the price of one pointer each."""
        links = tuple(links[:MOST_TOLD_LINKS])
        if not links:
            return
        self._waiting.append((replica, links))
        self._waiting_links += len(links)
        while len(self._waiting) > _MOST_WAITING or self._waiting_links > _MOST_WAITING_LINKS:
            self._pop()
            self.dropped += 1

    def take(self, now_s: float) -> list[RoutedNews]:
        """The next messages, oldest decision first; all of them, or as many as one turn may cost.

        They count as told: who cannot send them says so with `lost`.
        """
        if now_s - self._begun_s >= GENERATION_S:
            self.begin_generation(now_s)
        messages: list[RoutedNews] = []
        batch: list[Decision] = []
        room = MOST_LINKS
        while self._waiting and len(messages) < _MOST_MESSAGES:
            replica, links = self._pop()
            self.told += 1
            known = self._known(replica, links)
            if self._told_links + len(links) - known > MOST_TOLD_LINKS:
                if batch:
                    messages.append(RoutedNews(self._generation, tuple(batch)))
                    batch, room = [], MOST_LINKS
                self.begin_generation(now_s)
                known = 0
            for decision in _parts(replica, links, known):
                if len(decision.links) > room or len(batch) == _MOST_DECISIONS:
                    messages.append(RoutedNews(self._generation, tuple(batch)))
                    batch, room = [], MOST_LINKS
                batch.append(decision)
                room -= len(decision.links)
            self._told.setdefault(replica, set()).update(links[known:])
            self._told_links += len(links) - known
        if batch:
            messages.append(RoutedNews(self._generation, tuple(batch)))
        return messages

    def lost(self, messages: Sequence[RoutedNews], now_s: float) -> None:
        """Perhaps nobody has heard these: nothing that was told may be left out any more."""
        decisions = sum(not each.more for news in messages for each in news.decisions)
        self.told -= decisions
        self.dropped += decisions
        self.begin_generation(now_s)

    def begin_generation(self, now_s: float) -> None:
        """From now on everything is told anew."""
        self._told.clear()
        self._told_links = 0
        self._generation = (self._generation + 1) % (1 << 32)
        self._begun_s = now_s

    def _pop(self) -> tuple[str, Sequence[bytes]]:
        replica, links = self._waiting.popleft()
        self._waiting_links -= len(links)
        return replica, links

    def _known(self, replica: str, links: Sequence[bytes]) -> int:
        """How many links from the first were told: whole prefixes are, so halving finds it."""
        told = self._told.get(replica, ())
        known, unknown = 0, len(links)
        while known < unknown:
            middle = (known + unknown) // 2
            if links[middle] in told:
                known = middle + 1
            else:
                unknown = middle
        return known


def _parts(replica: str, links: Sequence[bytes], known: int) -> Iterator[Decision]:
    """One decision in as many parts as its new links need messages."""
    after = links[known - 1] if known else None
    while True:
        part = tuple(links[known : known + MOST_LINKS])
        known += len(part)
        more = known < len(links)
        yield Decision(replica, after, part, more)
        if not more:
            return
        after = part[-1]
