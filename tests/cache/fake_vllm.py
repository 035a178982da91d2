"""A vLLM's prefix cache as its events show it, in every form that these have had."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

Form = Literal["oldest", "array", "map", "map in map"]
FORMS: tuple[Form, ...] = ("oldest", "array", "map", "map in map")
_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
        "a_later_field",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality", "a_later_field"),
    "AllBlocksCleared": (),
}
_OLDEST_FIELDS = {"BlockStored": 5, "BlockRemoved": 1, "AllBlocksCleared": 0}


def stored(
    hashes: Sequence[int | bytes],
    parent: int | bytes | None,
    token_ids: Sequence[int],
    *,
    salt: str | None = None,
    block_size: int = 16,
    **fields: Any,
) -> dict[str, Any]:
    """A `BlockStored` as current versions send it; `salt` is in the first block's extra keys."""
    keys: list[Any] = [None] * len(hashes)
    if salt is not None and parent is None:
        keys[0] = (salt,)
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(token_ids),
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": keys,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": None,
        "locality": None,
        "a_later_field": {"x": [1]},
    } | fields


def removed(hashes: Sequence[int | bytes], **fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockRemoved",
        "block_hashes": list(hashes),
        "medium": "GPU",
        "group_idx": 0,
        "locality": "LOCAL",
        "a_later_field": None,
    } | fields


CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


def message(events: Sequence[dict[str, Any]], form: Form = "map") -> bytes:
    """One batch as it is published."""
    if form == "map in map":
        return msgspec.msgpack.encode({"ts": 1.5, "events": list(events), "data_parallel_rank": 0})
    if form == "map":
        return msgspec.msgpack.encode([1.5, list(events), 0])
    rows = []
    for event in events:
        kind = event["type"]
        names = _FIELDS[kind][: _OLDEST_FIELDS[kind] if form == "oldest" else None]
        rows.append([kind, *(event[name] for name in names)])
    return msgspec.msgpack.encode([1.5, rows] if form == "oldest" else [1.5, rows, 0])


class FakeVllm:
    """Hashes depend on `life`, as they do on what a vLLM draws at its start, and on `lookahead`
    tokens behind the block, as they do where it speculates."""

    def __init__(
        self, *, life: int = 0, block_size: int = 16, integers: bool = False, lookahead: int = 0
    ) -> None:
        self.block_size = block_size
        self.copies: Counter[int | bytes] = Counter()
        self.events: list[dict[str, Any]] = []
        self._life = life
        self._integers = integers
        self._lookahead = lookahead

    def take(self) -> list[dict[str, Any]]:
        """What has happened since this was asked last."""
        taken, self.events = self.events, []
        return taken

    def names(self, salt: str | None, token_ids: Sequence[int]) -> list[int | bytes]:
        """Its hashes of a prompt's full blocks."""
        names: list[int | bytes] = []
        state = repr((self._life, salt)).encode()
        last_end = len(token_ids) - self._lookahead
        for end in range(self.block_size, last_end + 1, self.block_size):
            read = token_ids[end - self.block_size : end + self._lookahead]
            block = repr(list(read)).encode()
            state = hashlib.sha256(state + block).digest()
            names.append(int.from_bytes(state[:8], "big") if self._integers else state)
        return names

    def serve(self, salt: str | None, token_ids: Sequence[int], *, twice: int = 0) -> None:
        """Compute and keep what is missing of a prompt, and its last `twice` blocks again."""
        names = self.names(salt, token_ids)
        present = 0
        while present < len(names) and self.copies[names[present]]:
            present += 1
        first = min(present, max(0, len(names) - twice))
        if first == len(names):
            return
        self.copies.update(names[first:])
        self.events.append(
            stored(
                names[first:],
                names[first - 1] if first else None,
                token_ids[first * self.block_size : len(names) * self.block_size],
                salt=salt,
                block_size=self.block_size,
            )
        )

    def evict(self, name: int | bytes) -> None:
        """One copy of a block goes."""
        self.copies[name] -= 1
        self.copies += Counter()
        self.events.append(removed([name]))

    def clear(self) -> None:
        """Everything goes."""
        self.copies.clear()
        self.events.append(CLEARED)
