"""What a vLLM tells of its cache, told again in our own terms.

vLLM names a block by a hash of its own, and says once, when the block is stored, which tokens it
holds and which block it extends. From that its link in our chain is made, as long as the chain can
be followed from its beginning: a prompt's first block has to say under which salt it was stored,
which tells whose chain it is. Of what cannot be followed nothing is told, and it is counted.

Several copies of a block can lie in a vLLM's cache, and each is told of when it comes and when it
goes. Where it speculates, a block's name goes by some tokens behind it too, so that blocks with one
link can have several names.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import TypeAlias

import xxhash

from cache.block import Tier
from cache.block_events import BlockEvents
from cache.hashing import CHAIN_BLOCK_TOKENS
from cache.held_links import HeldLinks
from cache.journal import Journal
from cache.vllm_messages import AllCleared, BlocksRemoved, BlocksStored, TheirHash, VllmEvent

RootOfSalt: TypeAlias = Callable[[str], bytes | None]
"""The root of the chains of prompts that are sent with a `cache_salt`; None if it is not ours."""

_TIERS: Mapping[object, Tier] = {None: Tier.DEVICE, "GPU": Tier.DEVICE, "CPU": Tier.DRAM}
_SALT_KEY = "cache_salt"
_EVERY_TOKEN = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of attention whose blocks make up whole prefixes; others keep a window or a state."""
_TOKEN_BYTES = 4
_CHAIN_BLOCK_BYTES = _TOKEN_BYTES * CHAIN_BLOCK_TOKENS
_MOST_BLOCKS = 1 << 18
_PIECE_BLOCKS = 256


class Untracked(StrEnum):
    """Why a block was not entered."""

    MEDIUM = "medium"
    """It lies where we know no tier."""
    ADAPTER = "adapter"
    """It is of a fine-tuned variant, which our chains do not tell from the model itself."""
    LAYERS = "layers"
    """It is of other layers than those that are followed, which say enough for all."""
    BLOCK_SIZE = "block size"
    """Our links do not end where it ends."""
    PARENT = "parent"
    """It extends a block that was not entered, or was told of before we listened."""
    UNSALTED = "unsalted"
    """It begins a prompt and does not say under which salt: not sent by a gateway, or a vLLM too
    old to say."""
    SALT = "salt"
    """It begins a prompt under a salt that is not known here."""
    CONTENT = "content"
    """It holds more than text, or says too little about its tokens."""


class _Block:
    """What is known under one name, and how many copies of that lie in each tier."""

    __slots__ = ("device", "dram", "link", "parent")

    def __init__(self, link: bytes, parent: TheirHash | None) -> None:
        self.link = link
        self.parent = parent
        self.device = 0
        self.dram = 0


class VllmRehasher:
    """Follows one vLLM. What it returns is to be applied in order; the first batch of a life that
    tells of blocks is a snapshot.

    `block_tokens` is the size of that vLLM's blocks, None as long as none has been entered in this
    life; links are those of blocks of this size. `untracked` counts blocks by reason, `tracked`
    those that were entered, each as often as it was told of.
    """

    def __init__(self, root_of_salt: RootOfSalt, *, max_blocks: int = _MOST_BLOCKS) -> None:
        """Of more than `max_blocks` different blocks (some 500 bytes each) those that have gone are
        forgotten, then those that were stored first. Raises ValueError for less than one."""
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, not {max_blocks}")
        self.block_tokens: int | None = None
        self.tracked = 0
        self.untracked: Counter[Untracked] = Counter()
        self._root_of_salt = root_of_salt
        self._max_blocks = max_blocks
        self._epoch = 0
        # Held blocks in the order in which they were stored, and others whose links are known yet,
        # by the order in which they went. What is said of copies counts for held ones only.
        self._held: OrderedDict[TheirHash, _Block] = OrderedDict()
        self._gone: OrderedDict[TheirHash, _Block] = OrderedDict()
        self._begin()

    def begin_life(self) -> BlockEvents:
        """The vLLM has been started again, or may have been: it holds nothing, and its hashes are
        different ones. The first batch of another epoch."""
        self._begin()
        return self._journal.snapshot({})

    def forget_told(self) -> BlockEvents:
        """Something that it told was missed: what it holds now is not known. What its blocks are
        still is, so that those that come to extend them can be followed."""
        self._gone = self._held
        self._hold_nothing()
        return self._journal.snapshot({})

    def follow(self, events: Iterable[VllmEvent]) -> Iterator[BlockEvents]:
        """Take in one message's events and say what has changed by them, batch after batch: a long
        message is taken in by pieces of about a millisecond, as the batches are asked for."""
        for event in events:
            match event:
                case BlocksStored():
                    for piece in _pieces(event):
                        self._store(piece)
                        if len(piece.hashes) == _PIECE_BLOCKS:
                            yield from self._told()
                case BlocksRemoved():
                    self._remove(event)
                case AllCleared():
                    yield self.forget_told()
        yield from self._told()

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks are held where they should be."""
        assert not self._held.keys() & self._gone.keys(), "a block is there and has gone"
        assert len(self._held) + len(self._gone) <= self._max_blocks, "more than may be remembered"
        for block in self._held.values():
            assert block.device > 0 or block.dram > 0, "a block is held nowhere"
        on_device = {block.link for block in self._held.values() if block.device}
        assert self._on_device.links() == on_device, "a link is held on the device by no block"
        in_dram = {block.link for block in self._held.values() if block.dram}
        assert self._in_dram.links() == in_dram, "a link is held in DRAM by no block"

    def _begin(self) -> None:
        self._epoch += 1
        self._journal = Journal(self._epoch)
        self.block_tokens = None
        self._group: object = None
        self._begun = False
        self._gone = OrderedDict()
        self._hold_nothing()

    def _hold_nothing(self) -> None:
        self._held = OrderedDict()
        self._on_device = HeldLinks(self._journal.of(Tier.DEVICE))
        self._in_dram = HeldLinks(self._journal.of(Tier.DRAM))

    def _told(self) -> Iterator[BlockEvents]:
        if not self._begun and self._held:
            self._begun = True
            yield self._journal.snapshot(
                {Tier.DEVICE: self._on_device.links(), Tier.DRAM: self._in_dram.links()}
            )
        while (batch := self._journal.take()) is not None:
            yield batch

    def _store(self, event: BlocksStored) -> None:
        tier = _tier_of(event)
        why_none = self._why_none(event, tier)
        if tier is None or why_none is not None:
            self.untracked[why_none or Untracked.MEDIUM] += len(event.hashes)
            return
        if tier is Tier.DEVICE and event.parent is not None:
            self._prove(event.parent)
        parent = event.parent
        for index, name in enumerate(event.hashes):
            block = self._held.get(name) or self._gone.get(name)
            if block is None:
                link = self._link(event, index, parent)
                if isinstance(link, Untracked):
                    self.untracked[link] += 1
                    parent = name
                    continue
                block = _Block(link, parent)
                if self.block_tokens is None:
                    self.block_tokens, self._group = event.block_tokens, event.group
            self._hold(name, block, tier)
            self.tracked += 1
            parent = name
        self._make_room()

    def _why_none(self, event: BlocksStored, tier: Tier | None) -> Untracked | None:
        """What is wrong with all of the event's blocks."""
        if tier is None:
            return Untracked.MEDIUM
        if event.adapted:
            return Untracked.ADAPTER
        if not _is_one_of(event.attention, _EVERY_TOKEN) or self._is_of_others(event.group):
            return Untracked.LAYERS
        return None

    def _is_of_others(self, group: object) -> bool:
        """Whether these are other layers than those that are followed: where there are several
        kinds, each tells of its own blocks, under the same names."""
        return group is not None and self._group is not None and group != self._group

    def _link(self, event: BlocksStored, index: int, parent: TheirHash | None) -> bytes | Untracked:
        """The link of one of the event's blocks, which was not known."""
        size = event.block_tokens
        if size < 1 or size % CHAIN_BLOCK_TOKENS or self.block_tokens not in (None, size):
            return Untracked.BLOCK_SIZE
        if len(event.token_bytes) != len(event.hashes) * size * _TOKEN_BYTES:
            return Untracked.CONTENT
        keys = event.extra_keys[index : index + 1] if isinstance(event.extra_keys, list) else []
        above = self._above(parent, keys[0] if keys else None)
        if isinstance(above, Untracked):
            return above
        start = index * size * _TOKEN_BYTES
        return _extended(above, event.token_bytes[start : start + size * _TOKEN_BYTES])

    def _above(self, parent: TheirHash | None, keys: object) -> bytes | Untracked:
        """The link of the block before, or the root of the chain."""
        if parent is None:
            if not keys:
                return Untracked.UNSALTED
            salt = _salt_alone(keys)
            return Untracked.CONTENT if salt is None else self._root_of_salt(salt) or Untracked.SALT
        if keys:
            return Untracked.CONTENT
        extended = self._held.get(parent) or self._gone.get(parent)
        return Untracked.PARENT if extended is None else extended.link

    def _hold(self, name: TheirHash, block: _Block, tier: Tier) -> None:
        if name not in self._held:
            self._gone.pop(name, None)
            block.device = block.dram = 0
            self._held[name] = block
        if tier is Tier.DEVICE:
            block.device += 1
            self._on_device.add(block.link)
        else:
            block.dram += 1
            self._in_dram.add(block.link)

    def _prove(self, name: TheirHash) -> None:
        """A block has come to extend this one, so that it is there, with all that it extends,
        whatever was missed."""
        missing: dict[TheirHash, _Block] = {}
        at: TheirHash | None = name
        while at is not None and at not in missing:
            block = self._held.get(at)
            if block is not None and block.device:
                break
            block = block or self._gone.get(at)
            if block is None:
                break
            missing[at] = block
            at = block.parent
        for above, block in reversed(missing.items()):
            self._hold(above, block, Tier.DEVICE)

    def _remove(self, event: BlocksRemoved) -> None:
        tier = _tier_of(event)
        if tier is None or self._is_of_others(event.group):
            return
        for name in event.hashes:
            block = self._held.get(name)
            if block is None:
                continue
            if tier is Tier.DEVICE and block.device:
                block.device -= 1
                self._on_device.remove(block.link)
            elif tier is Tier.DRAM and block.dram:
                block.dram -= 1
                self._in_dram.remove(block.link)
            if not block.device and not block.dram:
                del self._held[name]
                self._gone[name] = block

    def _make_room(self) -> None:
        while len(self._held) + len(self._gone) > self._max_blocks:
            if self._gone:
                self._gone.popitem(last=False)
                continue
            _, block = self._held.popitem(last=False)
            if block.device:
                self._on_device.remove(block.link, block.device)
            if block.dram:
                self._in_dram.remove(block.link, block.dram)


def _pieces(event: BlocksStored) -> Iterator[BlocksStored]:
    """The same blocks in several events, if they are many."""
    size = event.block_tokens * _TOKEN_BYTES
    keys = event.extra_keys
    if len(event.hashes) <= _PIECE_BLOCKS or len(event.token_bytes) != len(event.hashes) * size:
        yield event
        return
    parent = event.parent
    for start in range(0, len(event.hashes), _PIECE_BLOCKS):
        end = start + _PIECE_BLOCKS
        yield replace(
            event,
            hashes=event.hashes[start:end],
            parent=parent,
            token_bytes=event.token_bytes[start * size : end * size],
            extra_keys=keys[start:end] if isinstance(keys, list) else keys,
        )
        parent = event.hashes[min(end, len(event.hashes)) - 1]


def _extended(link: bytes, token_bytes: bytes) -> bytes:
    """The link of a block of so many tokens behind another's."""
    for start in range(0, len(token_bytes), _CHAIN_BLOCK_BYTES):
        link = xxhash.xxh3_128_digest(link + token_bytes[start : start + _CHAIN_BLOCK_BYTES])
    return link


def _salt_alone(keys: object) -> str | None:
    """The salt, if a block's content depends on nothing else; it may be tagged as what it is."""
    if not isinstance(keys, list) or len(keys) != 1:
        return None
    key = keys[0]
    if isinstance(key, list) and len(key) == 2 and key[0] == _SALT_KEY:
        key = key[1]
    return key if isinstance(key, str) else None


def _tier_of(event: BlocksStored | BlocksRemoved) -> Tier | None:
    known = not event.remote and _is_one_of(event.medium, _TIERS.keys())
    return _TIERS.get(event.medium) if known else None


def _is_one_of(value: object, known: Iterable[object]) -> bool:
    """Like `in`, for what may not be hashable."""
    return any(value == each for each in known)
