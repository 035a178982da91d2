"""Blocks that are to last in Redis and are not known to be there yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from cache.block import BlockKey

_MOST = 1 << 14
"""Beyond so many the wish is forgotten that was not tried for longest."""
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
        self._wishes: OrderedDict[bytes, Wish] = OrderedDict()
        self._again_s = 0.0

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._wishes)

    def add(self, key: BlockKey, seconds: float, now_s: float, erasure_mark: int) -> None:
        """The longer one of two for the same block counts."""
        known = self._wishes.get(key.link)
        if known is None or known.seconds <= seconds:
            self._wishes[key.link] = Wish(key, seconds, now_s + seconds, erasure_mark)
        if len(self._wishes) > _MOST:
            self._wishes.popitem(last=False)

    def stored(self, key: BlockKey, life_s: float) -> None:
        """Redis holds the block for `life_s` from now on."""
        wish = self._wishes.get(key.link)
        if wish is not None and wish.seconds <= life_s:
            del self._wishes[key.link]

    def withdraw(self, key: BlockKey) -> None:
        """Its content is gone."""
        self._wishes.pop(key.link, None)

    def tried(self, key: BlockKey, now_s: float) -> None:
        """It is not open for a second, and goes behind the others. What Redis does not take, of a
        tenant whose quota is used up for one, must neither be copied without end nor be all that is
        ever tried."""
        wish = self._wishes.pop(key.link)
        self._wishes[key.link] = wish._replace(again_s=now_s + _AGAIN_S)

    def clear(self) -> None:
        """There are none any more."""
        self._wishes.clear()

    def open(self, now_s: float) -> Iterator[Wish]:
        """Those to be tried: first those that were not for longest."""
        for wish in list(self._wishes.values()):
            if wish.until_s <= now_s:
                del self._wishes[wish.key.link]
            elif wish.again_s <= now_s:
                yield wish

    def due_again(self, now_s: float) -> bool:
        """Whether there are any, and none was tried in the last second: what failed then, because
        Redis was full or away, may work now."""
        if not self._wishes or now_s < self._again_s:
            return False
        self._again_s = now_s + _AGAIN_S
        return True
