"""One replica's bounded memory of blocks that were asked for, whether or not it still has them.

As `cache.sightings`, which also knows their texts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from loadtest.simulate.directory import Place


class _Sighting:
    """`mark`: pushed out of that tier and not asked for since."""

    __slots__ = ("mark", "seen")

    def __init__(self) -> None:
        self.seen = 0
        self.mark: Place | None = None


class Sightings:
    """The `most` blocks that were last asked for or pushed out. `forgotten` hears of each that was
    pushed out and leaves this memory, or is pushed out of another tier, before it was asked for
    again; `asked_again` of the others."""

    def __init__(
        self,
        most: int,
        *,
        asked_again: Callable[[Place], None],
        forgotten: Callable[[Place], None],
    ) -> None:
        self._most = most
        self._asked_again = asked_again
        self._forgotten = forgotten
        self._known: OrderedDict[int, _Sighting] = OrderedDict()  # next to forget first

    def see(self, blocks: Sequence[int]) -> None:
        """A prompt asked for these. Once per request."""
        known = self._known
        for block in blocks:
            sighting = known.get(block)
            if sighting is None:
                sighting = known[block] = _Sighting()
            sighting.seen += 1
        # a prompt's end is forgotten before its beginning
        for block in reversed(blocks):
            known.move_to_end(block)
        self._forget_surplus()
        for block in blocks:
            sighting = known.get(block)
            if sighting is not None and sighting.mark is not None:
                came_from, sighting.mark = sighting.mark, None
                self._asked_again(came_from)

    def times_seen(self, block: int) -> int:
        """How many requests asked for it, as far as is remembered."""
        sighting = self._known.get(block)
        return 0 if sighting is None else sighting.seen

    def pushed_out(self, block: int, place: Place) -> None:
        """It has left a tier. From now on it is watched whether it is asked for again."""
        known = self._known
        sighting = known.get(block)
        if sighting is None:
            sighting = known[block] = _Sighting()
        self._give_up_mark(sighting)
        sighting.mark = place
        known.move_to_end(block)
        self._forget_surplus()

    def _forget_surplus(self) -> None:
        known = self._known
        while len(known) > self._most:
            _, sighting = known.popitem(last=False)
            self._give_up_mark(sighting)

    def _give_up_mark(self, sighting: _Sighting) -> None:
        if sighting.mark is not None:
            self._forgotten(sighting.mark)
            sighting.mark = None
