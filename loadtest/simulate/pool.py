"""One replica's device pages or DRAM slots: what is free, cached and held, and what goes next.

Blocks form chains, and only leaves go: the end of a prompt before its beginning. Among leaves the
order is that of `policies.eviction`. Pages are counted, not named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from policies.eviction import EvictionOrder, advance_clock, eviction_order, eviction_priority


class Block:
    """A published block, or (with an id below 0) what a finished answer has left behind a prompt,
    which nobody can ask for again: `pages` of it, the last of which goes first."""

    __slots__ = ("hits", "holds", "id", "lined", "pages", "parent", "priority", "saving_s", "turn")

    def __init__(self, block_id: int, parent: int | None, pages: int, saving_s: float) -> None:
        self.id = block_id
        self.parent = parent
        self.pages = pages
        self.saving_s = saving_s
        self.hits = 0
        self.holds = 0
        self.priority = 0.0
        self.turn = 0
        self.lined = False
        """Whether it stands in the line of leaves with its present turn."""


class BlockPool:
    """`free + cached + held == total`, in pages.

    `stored` and `lost` are called for every block that comes to be found here, or is no more.
    """

    def __init__(
        self,
        pages: int,
        *,
        stored: Callable[[int], None] | None = None,
        lost: Callable[[Block], None] | None = None,
    ) -> None:
        self.total = self.free = pages
        self.cached = 0
        self.evictions = 0
        self.blocks: dict[int, Block] = {}
        self._stored = stored
        self._lost = lost
        self._children: dict[int, int] = {}  # by parent, whether or not that is here
        self._leaves: list[tuple[EvictionOrder, int, Block]] = []
        self._entries = 0
        self._rests = 0
        self._clock = 0.0
        self._turn = 0

    @property
    def available(self) -> int:
        """Pages that `take` could hand out now."""
        return self.free + self.cached

    def match(self, blocks: Sequence[int]) -> int:
        """How many of the first of `blocks` are here."""
        here = self.blocks
        found = 0
        for block in blocks:
            if block not in here:
                break
            found += 1
        return found

    def take(self, pages: int) -> None:
        """So many pages for new content, held; evicts cached ones when none are free. There must be
        as many to be had."""
        if pages > self.free:
            self._evict(pages - self.free)
        self.free -= pages

    def give(self, pages: int) -> None:
        """Held pages that nothing is published in are free again."""
        self.free += pages

    def publish(self, block_id: int, parent: int | None, saving_s: float) -> Block:
        """A held page now holds this block, held once. If it is here already, that one is held
        instead, and the page is free."""
        block = self.blocks.get(block_id)
        if block is not None:
            self.hold(block)
            self.free += 1
            return block
        block = Block(block_id, parent, 1, saving_s)
        block.holds = 1
        self._attach(block)
        return block

    def publish_chain(
        self, ids: Sequence[int], blocks: range, savings_s: Sequence[float], nodes: list[Block]
    ) -> None:
        """`publish` the `blocks` of a prompt that has these ids, and add them to `nodes`. What is
        saved goes by their places."""
        here, children, stored = self.blocks, self._children, self._stored
        parent = ids[blocks.start - 1] if blocks.start else None
        for index in blocks:
            block_id = ids[index]
            block = here.get(block_id)
            if block is None:
                here[block_id] = block = Block(block_id, parent, 1, savings_s[index])
                block.holds = 1
                if parent is not None:
                    children[parent] = children.get(parent, 0) + 1
                if stored is not None:
                    stored(block_id)
            else:
                self.hold(block)
                self.free += 1
            nodes.append(block)
            parent = block_id

    def hold(self, block: Block) -> None:
        """One more holder."""
        if not block.holds:
            self.cached -= block.pages
        block.holds += 1

    def release(self, blocks: list[Block]) -> None:
        """One holder fewer for each of a prompt's blocks, in their order. Holding them was a
        use."""
        children = self._children
        for block in reversed(blocks):
            block.holds -= 1
            if block.holds:
                continue
            self.cached += block.pages
            self._note_use(block)
            if block.id not in children:
                self._line_up(block)

    def use(self, blocks: Sequence[int]) -> None:
        """Those of a prompt's blocks that are here are hit, and held by nobody else after that."""
        used = [self.blocks[block] for block in blocks if block in self.blocks]
        for block in used:
            self.hold(block)
            block.hits += 1
        self.release(used)

    def leave_rest(self, pages: int, parent: Block | None, saving_s: float) -> Block:
        """Held pages stay cached behind `parent`, with what nobody else can ask for."""
        self._rests += 1
        rest = Block(-self._rests, None if parent is None else parent.id, pages, saving_s)
        self._attach(rest)
        self.cached += pages
        self._note_use(rest)
        self._line_up(rest)
        return rest

    def take_rest(self, rest: Block) -> int:
        """Whoever left it goes on: its pages, held again; 0 if it is gone."""
        if self.blocks.get(rest.id) is not rest:
            return 0
        self.cached -= rest.pages
        parent = self._detach(rest)
        if parent is not None:
            self._line_up(parent)
        return rest.pages

    def drop_in(self, block_id: int, parent: int | None, saving_s: float, hits: int) -> bool:
        """A copy of a block from another tier, held by nobody; False if it is here or there is no
        room."""
        if block_id in self.blocks or not self.available:
            return False
        self.take(1)
        block = self.publish(block_id, parent, saving_s)
        block.hits = hits
        self.release([block])
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books agree."""
        cached = sum(block.pages for block in self.blocks.values() if not block.holds)
        held = sum(block.pages for block in self.blocks.values() if block.holds)
        assert cached == self.cached, "the cached pages are miscounted"
        assert self.free >= 0, "more pages are taken than there are"
        assert self.free + cached + held <= self.total, "pages are counted twice"
        children: dict[int, int] = {}
        for block in self.blocks.values():
            if block.parent is not None:
                children[block.parent] = children.get(block.parent, 0) + 1
        assert children == self._children, "the children are miscounted"
        lined = {id(entry[2]) for entry in self._leaves if self._is_current(entry)}
        for block in self.blocks.values():
            if not block.holds and block.id not in children:
                assert id(block) in lined, "a leaf is not in line"

    def _attach(self, block: Block) -> None:
        self.blocks[block.id] = block
        parent = block.parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        if self._stored is not None and block.id >= 0:
            self._stored(block.id)

    def _detach(self, block: Block) -> Block | None:
        """Take it out; what it extends, if that is a leaf now."""
        del self.blocks[block.id]
        parent_id = block.parent
        if parent_id is None:
            return None
        left = self._children[parent_id] - 1
        if left:
            self._children[parent_id] = left
            return None
        del self._children[parent_id]
        parent = self.blocks.get(parent_id)
        return None if parent is None or parent.holds else parent

    def _note_use(self, block: Block) -> None:
        self._turn += 1
        block.turn = self._turn
        block.lined = False
        block.priority = eviction_priority(self._clock, block.saving_s, block.hits)

    def _line_up(self, leaf: Block) -> None:
        if not leaf.lined:
            leaf.lined = True
            self._entries += 1
            heappush(self._leaves, (_order(leaf), self._entries, leaf))

    def _is_current(self, entry: tuple[EvictionOrder, int, Block]) -> bool:
        order, _, block = entry
        return block.lined and block.turn == order[2] and self.blocks.get(block.id) is block

    def _evict(self, pages: int) -> None:
        leaves = self._leaves
        following: Block | None = None
        while pages:
            leaf = following or self._pop_leaf()
            following = None
            self._clock = advance_clock(self._clock, leaf.priority)
            going = min(pages, leaf.pages)
            pages -= going
            self.evictions += going
            self.cached -= going
            self.free += going
            if going < leaf.pages:
                leaf.pages -= going
                self._line_up(leaf)
                return
            parent = self._detach(leaf)
            if self._lost is not None and leaf.id >= 0:
                self._lost(leaf)
            if parent is None:
                continue
            # what a leaf extends saves less than it does, and mostly goes next
            if not leaves or _order(parent) < leaves[0][0]:
                following = parent
            else:
                self._line_up(parent)
        if following is not None:
            self._line_up(following)

    def _pop_leaf(self) -> Block:
        """The first in line."""
        leaves, children, blocks = self._leaves, self._children, self.blocks
        while True:
            order, _, leaf = heappop(leaves)
            if not leaf.lined or leaf.turn != order[2]:
                continue  # used since, and in line elsewhere if at all
            leaf.lined = False
            if not leaf.holds and leaf.id not in children and blocks.get(leaf.id) is leaf:
                return leaf


def _order(leaf: Block) -> EvictionOrder:
    return eviction_order(leaf.priority, 0.0, 0.0, leaf.turn)
