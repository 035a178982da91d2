"""The beginning of a prompt, as the directory knows beginnings: by its chain links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence


class Prefix:
    """Links for every block size in use, each made when it is first asked for."""

    def __init__(self, make: Callable[[int], Sequence[bytes]]) -> None:
        """`make(block_tokens)` gives the links of the prompt's full blocks of that size."""
        self._make = make
        self._made: dict[int, Sequence[bytes]] = {}

    def of(self, block_tokens: int) -> Sequence[bytes]:
        """The links of full blocks of this size, in order."""
        links = self._made.get(block_tokens)
        if links is None:
            links = self._made[block_tokens] = self._make(block_tokens)
        return links

    def by_size(self, sizes: Iterable[int]) -> Mapping[int, Sequence[bytes]]:
        """The links of every size."""
        return {size: self.of(size) for size in sizes}


def _none(_: int) -> Sequence[bytes]:
    return ()


UNKNOWN = Prefix(_none)
"""Of a prompt that shares KV with nobody, or does not read the cache."""
