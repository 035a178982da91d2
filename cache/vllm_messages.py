"""What a vLLM publishes of its cache, as it stands on the wire.

One message is a msgpack `KVEventBatch` (vllm/distributed/kv_events.py): time, events, rank. Batches
and events are arrays, events with their kind first, or, in later versions, maps, events with their
kind under "type". Versions append fields; hashes are integers or bytes. Both forms are read, fields
that are not known are passed over, and what cannot be read is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from cache.prompt_links import token_bytes_of

TheirHash: TypeAlias = int | bytes
_MAP_HEADS = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})
"""First bytes of a msgpack map."""
_REMOTE = "REMOTE"


class NotABatch(ValueError):
    """A message of which nothing can be read."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that extend each other, the first one `parent` (None: they begin a prompt).

    `token_bytes` holds their ids as little-endian uint32, `block_tokens` for each block unless the
    sender left out some. `extra_keys` has what else each block's content depends on, by block: the
    salt in a prompt's first, images, ...; None where nothing is said. `adapted`: by an adapter.
    `group` numbers the layers that the blocks are of, `attention` says of what kind these are.
    `remote`: what holds them is shared with other machines.
    """

    hashes: Sequence[TheirHash]
    parent: TheirHash | None
    token_bytes: bytes
    block_tokens: int
    medium: object
    adapted: bool
    extra_keys: object
    group: object
    attention: object
    remote: bool


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """One copy of each of these blocks has gone."""

    hashes: Sequence[TheirHash]
    medium: object
    group: object
    remote: bool


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Everything has gone."""


VllmEvent: TypeAlias = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class VllmBatch:
    """One message's events in order; how many were of an `unknown` kind, and how many
    `malformed`."""

    events: tuple[VllmEvent, ...]
    unknown: int = 0
    malformed: int = 0


# Fields that only ever matter when they have a certain value are of any type, so that a version
# that puts something else there is still understood in all others.


class _Stored(msgspec.Struct):
    block_hashes: list[TheirHash]
    parent_block_hash: TheirHash | None
    token_ids: list[int]
    block_size: int
    lora_id: Any = None
    medium: Any = None
    lora_name: Any = None
    extra_keys: Any = None
    group_idx: Any = None
    kv_cache_spec_kind: Any = None
    kv_cache_spec_sliding_window: Any = None
    locality: Any = None

    def event(self) -> VllmEvent:
        return BlocksStored(
            hashes=self.block_hashes,
            parent=self.parent_block_hash,
            token_bytes=token_bytes_of(self.token_ids),
            block_tokens=self.block_size,
            medium=self.medium,
            adapted=self.lora_id is not None or self.lora_name is not None,
            extra_keys=self.extra_keys,
            group=self.group_idx,
            attention=self.kv_cache_spec_kind,
            remote=self.locality == _REMOTE,
        )


class _Removed(msgspec.Struct):
    block_hashes: list[TheirHash]
    medium: Any = None
    group_idx: Any = None
    locality: Any = None

    def event(self) -> VllmEvent:
        remote = self.locality == _REMOTE
        return BlocksRemoved(self.block_hashes, self.medium, self.group_idx, remote)


class _Cleared(msgspec.Struct):
    def event(self) -> VllmEvent:
        return AllCleared()


class _StoredMap(_Stored, tag_field="type", tag="BlockStored"):
    pass


class _RemovedMap(_Removed, tag_field="type", tag="BlockRemoved"):
    pass


class _ClearedMap(_Cleared, tag_field="type", tag="AllBlocksCleared"):
    pass


class _StoredArray(_Stored, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(_Removed, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(_Cleared, array_like=True, tag="AllBlocksCleared"):
    pass


class _KindMap(msgspec.Struct):
    type: str


class _KindArray(msgspec.Struct, array_like=True):
    type: str


class _BatchMap(msgspec.Struct):
    events: list[msgspec.Raw]


class _BatchArray(msgspec.Struct, array_like=True):
    ts: Any
    events: list[msgspec.Raw]


_KINDS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_batch_map = msgspec.msgpack.Decoder(_BatchMap)
_batch_array = msgspec.msgpack.Decoder(_BatchArray)
_event_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_event_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_kind_map = msgspec.msgpack.Decoder(_KindMap)
_kind_array = msgspec.msgpack.Decoder(_KindArray)
_UNREADABLE = (msgspec.MsgspecError, RecursionError)


def decode_batch(payload: bytes) -> VllmBatch:
    """Raises NotABatch, and nothing else, for a message of which nothing can be read."""
    try:
        batch: _BatchMap | _BatchArray = (
            _batch_map.decode(payload) if _is_map(payload) else _batch_array.decode(payload)
        )
    except _UNREADABLE as error:
        raise NotABatch(type(error).__name__) from error
    events: list[VllmEvent] = []
    unknown = malformed = 0
    for raw in batch.events:
        try:
            events.append(_decode_event(raw))
        except (*_UNREADABLE, OverflowError):
            if _is_of_another_kind(raw):
                unknown += 1
            else:
                malformed += 1
    return VllmBatch(tuple(events), unknown, malformed)


def _decode_event(raw: msgspec.Raw) -> VllmEvent:
    event: _Stored | _Removed | _Cleared = (
        _event_map.decode(raw) if _is_map(raw) else _event_array.decode(raw)
    )
    return event.event()


def _is_of_another_kind(raw: msgspec.Raw) -> bool:
    try:
        kind = _kind_map.decode(raw) if _is_map(raw) else _kind_array.decode(raw)
    except _UNREADABLE:
        return False
    return kind.type not in _KINDS


def _is_map(data: bytes | msgspec.Raw) -> bool:
    return next(iter(memoryview(data)), 0) in _MAP_HEADS
