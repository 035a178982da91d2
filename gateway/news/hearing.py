"""The other side of `telling`: whole prefixes again, from news that leaves out what was told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.news.messages import Decision, RoutedNews
from gateway.news.telling import GENERATION_S, MOST_TOLD_LINKS

_FORGET_S = 2 * GENERATION_S
_MOST_SENDERS = 1024
_MOST_LINKS = 16 * MOST_TOLD_LINKS
"""Of all senders together, about 160 MB. As many senders as tell of nothing but new prompts all the
time; of others, which tell far fewer links, any number is followed."""


@dataclass(slots=True)
class _Memory:
    """What one sender told in its present generation: by replica, each link's predecessor."""

    generation: int
    heard_s: float
    links: int = 0
    parents: dict[str, dict[bytes, bytes | None]] = field(default_factory=dict)


class Hearing:
    """Remembers what senders told. Time is an argument."""

    def __init__(self) -> None:
        self._senders: dict[bytes, _Memory] = {}  # who was heard last is the last one
        self.heard = 0
        self.unresolved = 0
        self.links = 0
        """How many are remembered, of all senders."""

    def hear(
        self, sender: bytes, news: RoutedNews, now_s: float
    ) -> Iterator[tuple[str, list[bytes]]]:
        """The replica and the whole prefix of each decision. One that goes on after something that
        was missed is counted and left out."""
        memory = self._memory_of(sender, news.generation, now_s)
        for decision in news.decisions:
            if not self._learn(memory, decision):
                if not decision.more:
                    self.unresolved += 1
                continue
            if decision.more:
                continue
            self.heard += 1
            parents = memory.parents[decision.replica]
            link = decision.links[-1] if decision.links else decision.after
            prefix = []
            while link is not None:
                prefix.append(link)
                link = parents[link]
            prefix.reverse()
            yield decision.replica, prefix

    def _memory_of(self, sender: bytes, generation: int, now_s: float) -> _Memory:
        """The sender's memory, empty in a new generation, in its place as the last one heard."""
        memory = self._senders.pop(sender, None)
        if memory is None or memory.generation != generation:
            if memory is not None:
                self.links -= memory.links
            memory = _Memory(generation, now_s)
        memory.heard_s = now_s
        self._senders[sender] = memory
        while len(self._senders) > _MOST_SENDERS or self._oldest.heard_s < now_s - _FORGET_S:
            self._forget_oldest()
        return memory

    @property
    def _oldest(self) -> _Memory:
        return next(iter(self._senders.values()))

    def _forget_oldest(self) -> None:
        self.links -= self._senders.pop(next(iter(self._senders))).links

    def _learn(self, memory: _Memory, decision: Decision) -> bool:
        """Enter its links; False if they go on after one that is not known, or are too many."""
        parents = memory.parents.setdefault(decision.replica, {})
        if decision.after is not None and decision.after not in parents:
            return False
        if memory.links + len(decision.links) > MOST_TOLD_LINKS:
            return False
        before = len(parents)
        parent = decision.after
        for link in decision.links:
            # A link keeps the predecessor that it came with, which was there before it. So even
            # hashes that collide make no ring.
            parents.setdefault(link, parent)
            parent = link
        memory.links += len(parents) - before
        self.links += len(parents) - before
        while self.links > _MOST_LINKS and self._oldest is not memory:
            self._forget_oldest()
        return True
