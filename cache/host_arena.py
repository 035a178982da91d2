"""The DRAM tier's memory: block-sized slots, each ready to be sent as it lies."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch

from cache.host_memory import map_zeroed

_ALIGN_BYTES = 64  # a cache line; what the copies like best


class HostArena:
    """`slots` slots of host memory, each a block's payload behind room for a header.

    The header's room ends where the payload begins, so that both together are one contiguous
    value, and the payload is aligned to 64 bytes. Memory becomes resident when it is written. With
    `pinned` all of it is page-locked at once, for copies by a CUDA device without staging; that
    raises MemoryError where the system will not lock so much.
    """

    def __init__(self, slots: int, block_bytes: int, *, header_bytes: int, pinned: bool) -> None:
        if slots <= 0 or block_bytes <= 0 or header_bytes < 0:
            raise ValueError(
                f"an arena of {slots} slots of {header_bytes} + {block_bytes} bytes cannot be"
            )
        self.slots, self.block_bytes, self.header_bytes = slots, block_bytes, header_bytes
        self.pinned = pinned
        self._payload_at = _round_up(header_bytes)
        self._stride = self._payload_at + _round_up(block_bytes)
        region = map_zeroed(slots * self._stride)
        flat = torch.frombuffer(region, dtype=torch.uint8)
        self._unpin = _pin(self, region, flat) if pinned else None
        self._bytes = memoryview(region)
        self.payloads = flat.view(slots, self._stride)[:, self._payload_at :][:, :block_bytes]
        """uint8 [slots, block_bytes], rows apart by more than block_bytes."""

    def value(self, slot: int) -> memoryview:
        """Header room and payload of a slot: header_bytes + block_bytes, writable, not a copy."""
        payload = self._payload_start(slot)
        return self._bytes[payload - self.header_bytes : payload + self.block_bytes]

    def payload(self, slot: int) -> memoryview:
        """The payload of a slot: block_bytes, writable, not a copy."""
        start = self._payload_start(slot)
        return self._bytes[start : start + self.block_bytes]

    def close(self) -> None:
        """Unpin and let go of the memory, which stays while a view of it is about. Idempotent.

        Copies to or from the arena must be over.
        """
        if self._unpin is not None:
            self._unpin()
        self.slots = 0
        self._bytes = memoryview(b"")
        self.payloads = self.payloads.new_empty(0, self.block_bytes)

    def _payload_start(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return slot * self._stride + self._payload_at


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _pin(arena: HostArena, region: mmap.mmap, flat: torch.Tensor) -> weakref.finalize[..., object]:
    """Page-lock the region. torch's own pinned memory comes in powers of two: up to twice this."""
    error = int(_cuda_runtime().cudaHostRegister(flat.data_ptr(), flat.nbytes, 0))
    if error:
        raise MemoryError(f"{flat.nbytes} bytes cannot be page-locked (CUDA error {error})")
    # The finalizer also keeps the region mapped until it is unlocked.
    return weakref.finalize(arena, _unpin, region, flat)


def _unpin(_region: mmap.mmap, flat: torch.Tensor) -> None:
    _cuda_runtime().cudaHostUnregister(flat.data_ptr())


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
