"""The program run by the compiled CPU kernels: one C call per step, no Python between layers."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable

import numpy as np
import torch

from cache.host_memory import PageMemory
from engine.architecture import Architecture
from engine.decoder import Program, weight_names
from engine.executors.base import Int32Array, StepBatch
from engine.executors.native_build import NativeUnavailable
from engine.executors.native_library import (
    ISA_NUMBERS,
    NEVER,
    Ending,
    OpKind,
    ShapeStruct,
    StepStruct,
    open_library,
)
from engine.executors.native_lowering import lower
from engine.executors.native_weights import WeightPacker

__all__ = ["NativeExecutor", "NativeUnavailable", "native_bytes_per_block"]

_log = logging.getLogger("forebay.engine")

_GROUP_TOKENS = 16
_MAX_HEAD_DIM = 512
_DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1}
_HEAD_MULTIPLE = {torch.float32: 16, torch.bfloat16: 32}
_LAYOUTS = {torch.float32: "packed16-f32", torch.bfloat16: "packed16-bf16"}


def native_bytes_per_block(arch: Architecture, dtype: torch.dtype, block_tokens: int) -> int:
    """Bytes of one block of KV over all layers: head_dim padded to 16 (float32) or 32 (bfloat16).

    Raises NativeUnavailable for a dtype or block size that the kernels do not have.
    """
    if dtype not in _DTYPE_NUMBERS:
        raise NativeUnavailable(f"the kernels compute in float32 or bfloat16, not {dtype}")
    if block_tokens <= 0 or block_tokens % _GROUP_TOKENS:
        raise NativeUnavailable(f"block_tokens must be a multiple of 16, not {block_tokens}")
    multiple = _HEAD_MULTIPLE[dtype]
    head_dim = -(-arch.head_dim // multiple) * multiple
    elements = 2 * arch.kv_heads * head_dim * len(arch.layers)
    return elements * block_tokens * dtype.itemsize


class NativeExecutor:
    """Implements `engine.executors.base.PausableExecutor` on the CPU.

    A row's result is the same bits whatever else is in the step, for a given dtype and instruction
    set. Weights are taken out of `weights` as they are packed, so that no matrix lives twice; when
    the constructor raises NativeUnavailable none has been taken.

    FOREBAY_NATIVE_ISA (`amx`, `avx512bf16` or `portable`) forces an instruction set for bfloat16;
    by default the best is used. `share_prefixes` off reads shared prefixes once per sequence
    instead of once: the same result, slower.
    """

    def __init__(
        self,
        program: Program,
        weights: dict[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        blocks: int,
        block_tokens: int,
        threads: int,
        max_tokens: int,
        share_prefixes: bool = True,
        say: Callable[[str], None] = _log.info,
    ) -> None:
        arch = program.architecture
        block_bytes = native_bytes_per_block(arch, dtype, block_tokens)
        _check_shape(arch)
        ops = lower(program)
        self._library = open_library(say)
        self.isa = _choose_isa(self._library, dtype)
        self.name = "native-float32" if dtype == torch.float32 else f"native-{self.isa}"
        self.device, self.dtype, self.block_tokens = torch.device("cpu"), dtype, block_tokens
        self.kv_layout = _LAYOUTS[dtype]
        _check_weights(program, weights)
        shape = ShapeStruct(
            dtype=_DTYPE_NUMBERS[dtype],
            isa=ISA_NUMBERS[self.isa],
            threads=threads,
            vocab=arch.vocab_size,
            hidden=arch.hidden_size,
            intermediate=arch.intermediate_size,
            heads=arch.heads,
            kv_heads=arch.kv_heads,
            head_dim=arch.head_dim,
            layers=len(arch.layers),
            block_tokens=block_tokens,
            blocks=blocks,
            max_tokens=max_tokens,
            norm_eps=arch.norm_eps,
        )
        handle = self._library.forebay_create(ctypes.byref(shape))
        if not handle:
            raise NativeUnavailable(self._library.forebay_error().decode())
        self._handle: int = handle
        # Threads and memory go with the executor even if nobody calls close().
        self._release = weakref.finalize(self, self._library.forebay_destroy, handle)
        packer = WeightPacker(self._library, handle, weights, dtype, ops)
        for rope in arch.ropes:
            packer.add_rope(rope)
        for op in ops:
            packer.add(op)
        self._tables = packer.tables
        self._page_memory = PageMemory(blocks, block_bytes)
        self.pages = self._page_memory.pages
        self._pause_after = ctypes.c_int32(NEVER)
        pages, share = self.pages.data_ptr(), int(share_prefixes)
        self._main = _Workspace(0, arch.vocab_size, StepStruct(pages=pages, share_prefixes=share))
        self._beside = _Workspace(1, arch.vocab_size, StepStruct(pages=pages, share_prefixes=share))

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """See `Executor.forward`. Raises ValueError for indices outside their range."""
        self._check_open()
        space = self._main if self._main.batch is None else self._beside
        space.fill(batch)
        space.step.pause_after = None
        ending = self._library.forebay_step(self._handle, space.number, ctypes.byref(space.step))
        logits = self._logits(space, ending)
        assert logits is not None
        return logits

    def start(self, batch: StepBatch) -> torch.Tensor | None:
        """See `PausableExecutor.start`. Raises ValueError for indices outside their range."""
        self._check_open()
        space = self._main
        space.fill(batch)
        space.step.pause_after = ctypes.addressof(self._pause_after)
        ending = self._library.forebay_step(self._handle, space.number, ctypes.byref(space.step))
        return self._logits(space, ending)

    def resume(self) -> torch.Tensor | None:
        """See `PausableExecutor.resume`."""
        self._check_open()
        if self._main.batch is None:
            raise RuntimeError("no step lies aside")
        ending = self._library.forebay_resume(self._handle, self._main.number)
        return self._logits(self._main, ending)

    def pause(self, after_op: int = 0) -> None:
        """See `PausableExecutor.pause`: after op `after_op` of the program at the earliest."""
        self._pause_after.value = after_op

    def unpause(self) -> None:
        """See `PausableExecutor.unpause`."""
        self._pause_after.value = NEVER

    def _logits(self, space: _Workspace, ending: int) -> torch.Tensor | None:
        """What the step left, or None if it lies aside now. Raises ValueError if it failed."""
        if ending == Ending.PAUSED:
            return None
        space.batch = None
        if ending == Ending.FAILED:
            raise ValueError(self._library.forebay_error().decode())
        return space.logits[: space.step.logit_row_count]

    def profile(self) -> dict[str, float]:
        """Milliseconds per kind of op since the last call, and go on counting.

        The first call starts the count. It costs a clock reading per op and step.
        """
        self._check_open()
        counted = (ctypes.c_int64 * len(OpKind))()
        self._library.forebay_profile(self._handle, 1, counted)
        return {kind.name.lower(): counted[kind] / 1e6 for kind in OpKind}

    def read_memory(self, region: torch.Tensor) -> None:
        """Read every byte of a contiguous tensor on all threads: a step cannot be faster."""
        self._check_open()
        self._library.forebay_read(self._handle, region.data_ptr(), region.nbytes)

    def close(self) -> None:
        """See `Executor.close`."""
        self._page_memory.close()
        self._release()
        self._tables.clear()

    def _check_open(self) -> None:
        if not self._release.alive:
            raise RuntimeError("the executor is closed")


class _Workspace:
    """A step as the kernels see it, and what must not go while it is under way."""

    __slots__ = ("_tables", "_vocab_size", "batch", "logits", "number", "step")

    def __init__(self, number: int, vocab_size: int, step: StepStruct) -> None:
        self.number = number
        self.step = step
        self.logits = torch.empty(0, vocab_size)
        self.batch: StepBatch | None = None
        self._tables: Int32Array | None = None
        self._vocab_size = vocab_size

    def fill(self, batch: StepBatch) -> None:
        """Point the step at this batch. Raises ValueError for arrays of another form."""
        step, rows = self.step, len(batch.logit_rows)
        self.batch = None
        if rows > len(self.logits):
            self.logits = torch.empty(rows, self._vocab_size)
        tables = np.ascontiguousarray(batch.block_tables)
        step.token_ids = _address(batch.token_ids)
        step.positions = _address(batch.positions)
        step.query_starts = _address(batch.query_starts)
        step.context_lengths = _address(batch.context_lengths)
        step.block_tables = _address(tables)
        step.logit_rows = _address(batch.logit_rows)
        step.logits = self.logits.data_ptr()
        step.tokens = len(batch.token_ids)
        step.sequences, step.table_width = tables.shape
        step.logit_row_count = rows
        self.batch, self._tables = batch, tables


def _choose_isa(library: ctypes.CDLL, dtype: torch.dtype) -> str:
    """Name of the instruction set to use; float32 has only one way."""
    wanted = os.environ.get("FOREBAY_NATIVE_ISA", "auto").lower()
    if wanted not in ISA_NUMBERS:
        raise NativeUnavailable(f"FOREBAY_NATIVE_ISA={wanted} is none of {', '.join(ISA_NUMBERS)}")
    if dtype == torch.float32:
        return "portable"
    chosen = library.forebay_isa(ISA_NUMBERS[wanted])
    for name, number in ISA_NUMBERS.items():
        if number == chosen:
            return name
    raise NativeUnavailable(f"FOREBAY_NATIVE_ISA={wanted}: this machine does not have it")


def _check_shape(arch: Architecture) -> None:
    widths = (arch.hidden_size, arch.intermediate_size, arch.query_size, arch.head_dim)
    if any(width % 2 for width in widths):
        raise NativeUnavailable(f"widths must be even, and one of {widths} is not")
    if arch.head_dim > _MAX_HEAD_DIM:
        raise NativeUnavailable(f"head_dim {arch.head_dim} is over {_MAX_HEAD_DIM}")
    if any(2 * len(rope.inverse_frequencies) > arch.head_dim for rope in arch.ropes):
        raise NativeUnavailable("a rotary embedding is wider than a head")


def _check_weights(program: Program, weights: dict[str, torch.Tensor]) -> None:
    missing = sorted(weight_names(program.architecture) - weights.keys())
    if missing:
        raise NativeUnavailable(f"{len(missing)} weights are missing, the first is {missing[0]}")


def _address(array: Int32Array) -> int:
    if array.dtype != np.int32 or not array.flags.c_contiguous:
        raise ValueError("a step's arrays must be C-contiguous int32")
    return array.ctypes.data
