"""The other side of `telling`: whole prefixes again, from news that leaves out what was told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.news.messages import Decision, RoutedNews
from gateway.news.telling import GENERATION_S, MOST_TOLD_LINKS

_FORGET_S = 2 * GENERATION_S
_MOST_SENDERS = 16
"""Each may cost about 10 MB while it tells of nothing but new prompts."""


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
        self._senders: dict[bytes, _Memory] = {}
        self.heard = 0
        self.unresolved = 0

    @property
    def links(self) -> int:
        """How many links are remembered, of all senders."""
        return sum(memory.links for memory in self._senders.values())

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
            memory = _Memory(generation, now_s)
        memory.heard_s = now_s
        self._senders[sender] = memory
        while len(self._senders) > _MOST_SENDERS:
            del self._senders[next(iter(self._senders))]
        while (oldest := next(iter(self._senders.items())))[1].heard_s < now_s - _FORGET_S:
            del self._senders[oldest[0]]
        return memory

    @staticmethod
    def _learn(memory: _Memory, decision: Decision) -> bool:
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
        return True
