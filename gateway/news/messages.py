"""The news as bytes, before they are sealed. Little-endian, counts in front, nothing optional.

Routed: generation u32, then per decision: name length u16, name, flags u8, the link it goes on
after (16 bytes, if flagged), number of links u16, the links. Loads: flags u8, then per replica:
name length u16, name, four u64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

from cache.hashing import HASH_BYTES
from gateway.news.fleet_news import OwnLoad

MOST_LINKS = 256
"""In one message, which bounds it to about 4 KiB and with it the memory of a stream of them."""

_GENERATION = Struct("<I")
_FLAGS = Struct("<B")
_LENGTH = Struct("<H")
_LOAD = Struct("<4Q")
_LOAD_MOST = (1 << 64) - 1

_GOES_ON = 1
_MORE = 2
_LEAVING = 1


class Decision(NamedTuple):
    """A prefix that was sent to a replica: what was told before up to `after` (None: nothing), then
    `links`. With `more`, the next decision of the same sender goes on where this one ends, and only
    the last of them stands for a request."""

    replica: str
    after: bytes | None
    links: tuple[bytes, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class RoutedNews:
    """Decisions in their order. `after` refers to what the same sender told of the same replica in
    the same `generation`."""

    generation: int
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class LoadNews:
    """All that a gateway has under way; replicas that are not named have nothing of it. `leaving`:
    its last words."""

    loads: Mapping[str, OwnLoad]
    leaving: bool = False


def pack_routed(news: RoutedNews) -> bytes:
    """The bytes of some decisions. Raises ValueError for a link that is not 16 bytes long."""
    parts = [_GENERATION.pack(news.generation)]
    for replica, after, links, more in news.decisions:
        flags = (0 if after is None else _GOES_ON) | (_MORE if more else 0)
        joined = b"".join(links)
        if len(joined) != HASH_BYTES * len(links) or len(after or b"") not in (0, HASH_BYTES):
            raise ValueError(f"a link is {HASH_BYTES} bytes long")
        parts += (
            _packed_name(replica),
            _FLAGS.pack(flags),
            after or b"",
            _LENGTH.pack(len(links)),
            joined,
        )
    return b"".join(parts)


def unpack_routed(data: bytes) -> RoutedNews:
    """The decisions again. Raises ValueError if that is not what the bytes are."""
    reader = _Reader(data)
    (generation,) = reader.take(_GENERATION)
    decisions = []
    while reader.left:
        replica = reader.name()
        (flags,) = reader.take(_FLAGS)
        after = reader.cut(HASH_BYTES) if flags & _GOES_ON else None
        (count,) = reader.take(_LENGTH)
        joined = reader.cut(count * HASH_BYTES)
        links = tuple(joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))
        decisions.append(Decision(replica, after, links, bool(flags & _MORE)))
    return RoutedNews(generation, tuple(decisions))


def pack_loads(news: LoadNews) -> bytes:
    """The bytes of one gateway's loads; figures below zero become zero."""
    parts = [_FLAGS.pack(_LEAVING if news.leaving else 0)]
    for replica, load in news.loads.items():
        figures = (min(max(int(figure), 0), _LOAD_MOST) for figure in load)
        parts += (_packed_name(replica), _LOAD.pack(*figures))
    return b"".join(parts)


def unpack_loads(data: bytes) -> LoadNews:
    """The loads again. Raises ValueError if that is not what the bytes are."""
    reader = _Reader(data)
    (flags,) = reader.take(_FLAGS)
    loads = {}
    while reader.left:
        replica = reader.name()
        loads[replica] = OwnLoad(*reader.take(_LOAD))
    return LoadNews(loads, bool(flags & _LEAVING))


class _Reader:
    """Takes bytes off the front. Raises ValueError when there are too few."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, form: Struct) -> tuple[int, ...]:
        return form.unpack(self.cut(form.size))

    def cut(self, count: int) -> bytes:
        if count > self.left:
            raise ValueError("the message ends too early")
        self._at += count
        return self._data[self._at - count : self._at]

    def name(self) -> str:
        (length,) = self.take(_LENGTH)
        return self.cut(length).decode()


def _packed_name(name: str) -> bytes:
    encoded = name.encode()
    try:
        return _LENGTH.pack(len(encoded)) + encoded
    except StructError as error:
        raise ValueError("a replica's name is too long") from error
