"""Ids for blocks: one for each block together with everything before it."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator


class BlockIds:
    """Gives ids from 0 up, in the order in which blocks are first seen.

    What a block holds is told by its key. Whether keys already say what stood before, as chained
    hashes do, or only what is in the block itself, does not matter: two blocks have one id if
    their keys and those of all before them are equal.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[int | None, Hashable], int] = {}
        self._given = 0

    def of(self, keys: Iterable[Hashable], *, tail: bool = False) -> array[int]:
        """The ids of one prompt's blocks; with `tail` one more, which no other prompt has."""
        ids = array("q")
        parent: int | None = None
        for key in keys:
            parent = self._ids.setdefault((parent, key), self._given)
            self._given += parent == self._given
            ids.append(parent)
        if tail:
            ids.append(self._given)
            self._given += 1
        return ids


def filled(prompt_tokens: int, block_tokens: int) -> Iterator[int]:
    """How many tokens of a prompt each of its blocks holds. Part of a block's key: the beginning
    of a block is another block."""
    whole, rest = divmod(prompt_tokens, block_tokens)
    for _ in range(whole):
        yield block_tokens
    if rest:
        yield rest
