"""Blocks that are to last in Redis and are not known to be there yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from cache.block import BlockKey

_MOST = 1 << 14
"""Beyond so many one is forgotten: what was in vain longest ago, else the oldest."""
_AGAIN_S = 1.0


class Wish(NamedTuple):
    """A block, and for how many seconds it shall be in Redis; at `until_s` the wish itself is over.
    It is not tried before `again_s`. `erasure_mark` is that of `Tiers`: what was erased since is
    not wished for any more."""

    key: BlockKey
    seconds: float
    until_s: float
    erasure_mark: int
    again_s: float = 0.0


class DurableWishes:
    """Remembers them until they are fulfilled, over, or cannot be any more."""

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, Wish] = OrderedDict()
        self._tried: OrderedDict[bytes, Wish] = OrderedDict()
        """By themselves, in the order in which they open again: there may be thousands of them that
        Redis does not take, and the others are looked at between two steps."""
        self._again_s = 0.0

    def __len__(self) -> int:
        """How many there are."""
        return len(self._open) + len(self._tried)

    def add(self, key: BlockKey, seconds: float, now_s: float, erasure_mark: int) -> None:
        """The longer one of two for the same block counts."""
        known = self._find(key)
        if known is None or known.seconds <= seconds:
            self._tried.pop(key.link, None)
            self._open[key.link] = Wish(key, seconds, now_s + seconds, erasure_mark)
        if len(self) > _MOST:
            (self._tried or self._open).popitem(last=False)

    def stored(self, key: BlockKey, life_s: float) -> None:
        """Redis holds the block for `life_s` from now on."""
        wish = self._find(key)
        if wish is not None and wish.seconds <= life_s:
            self.withdraw(key)

    def withdraw(self, key: BlockKey) -> None:
        """Its content is gone."""
        self._open.pop(key.link, None)
        self._tried.pop(key.link, None)

    def tried(self, key: BlockKey, now_s: float) -> None:
        """One that is open is not for a second, and goes behind the others. What Redis does not
        take, of a tenant whose quota is used up for one, must neither be copied without end nor be
        all that is ever tried."""
        wish = self._open.pop(key.link)
        self._tried[key.link] = wish._replace(again_s=now_s + _AGAIN_S)

    def clear(self) -> None:
        """There are none any more."""
        self._open.clear()
        self._tried.clear()

    def open(self, now_s: float) -> Iterator[Wish]:
        """Those to be tried: first those that were not for longest."""
        while self._tried and next(iter(self._tried.values())).again_s <= now_s:
            link, wish = self._tried.popitem(last=False)
            self._open[link] = wish
        for wish in list(self._open.values()):
            if wish.until_s <= now_s:
                self.withdraw(wish.key)
            else:
                yield wish

    def due_again(self, now_s: float) -> bool:
        """Whether there are any, and none was tried in the last second: what failed then, because
        Redis was full or away, may work now."""
        if not self or now_s < self._again_s:
            return False
        self._again_s = now_s + _AGAIN_S
        return True

    def _find(self, key: BlockKey) -> Wish | None:
        return self._open.get(key.link) or self._tried.get(key.link)
