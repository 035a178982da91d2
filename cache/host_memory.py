"""Host memory for KV: device pages of a CPU, mapped at once and made resident in the background.

A page that is touched for the first time is a fault, and the kernel has to find and clear memory
for it while the step waits; in a virtual machine that took longer than the attention of a cold
prompt. So a thread makes the pool resident beforehand. It changes no content, so that the
engine may use the pages meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import weakref

import torch

_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap has no name for it yet
_PIECE_BYTES = 16 << 20


def map_zeroed(size_bytes: int) -> mmap.mmap:
    """Private zeroed memory, in huge pages where the kernel has them; resident once touched."""
    region = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return region


class PageMemory:
    """`pages` is zeroed uint8 [blocks, block_bytes], page-aligned. It stays valid while anything
    refers to it."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        region = map_zeroed(blocks * block_bytes)
        self.pages = torch.frombuffer(region, dtype=torch.uint8).view(blocks, block_bytes)
        stop = threading.Event()
        self._thread = threading.Thread(
            target=_make_resident, args=(self.pages, stop), name="forebay-pages", daemon=True
        )
        self._release = weakref.finalize(self, stop.set)
        self._thread.start()

    def wait_resident(self) -> None:
        """Until the background work is over."""
        self._thread.join()

    def close(self) -> None:
        """Stop the background work, and wait for the piece it is at. Idempotent."""
        self._release()
        self._thread.join()


def _make_resident(pages: torch.Tensor, stop: threading.Event) -> None:
    """Piece by piece, until done or stopped. Where the kernel cannot, pages come when touched."""
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise  # lets go of the interpreter lock
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start in range(0, pages.nbytes, _PIECE_BYTES):
        piece = min(_PIECE_BYTES, pages.nbytes - start)
        if stop.is_set() or advise(pages.data_ptr() + start, piece, _MADV_POPULATE_WRITE):
            return
