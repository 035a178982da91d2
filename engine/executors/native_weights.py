"""Hands a model's weights to the kernels, matrix by matrix, in the kernels' packing."""

from __future__ import annotations

import ctypes

import torch

from engine.architecture import Rope
from engine.executors.native_library import ACTIVATION_NUMBERS, NONE, OpKind, OpStruct
from engine.executors.native_lowering import NativeOp

_PANEL = 16  # outputs side by side in a panel


class WeightPacker:
    """Moves weights out of `weights` into an executor's handle, each when an op first needs it.

    `tables` collects tensors that the kernels read in place; the executor keeps them alive.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        handle: int,
        weights: dict[str, torch.Tensor],
        dtype: torch.dtype,
        ops: list[NativeOp],
    ) -> None:
        self.tables: list[torch.Tensor] = []
        self._library, self._handle = library, handle
        self._weights, self._dtype = weights, dtype
        self._multiplied = {op.matrix for op in ops if op.kind != OpKind.EMBED and op.matrix}
        self._matrices: dict[tuple[str, ...], int] = {}
        self._vectors: dict[tuple[str, ...], int] = {}

    def add(self, op: NativeOp) -> None:
        """Append `op` to the handle's program, its weights packed."""
        bias, bias2 = self._biases(op)
        struct = OpStruct(
            kind=op.kind,
            src=op.src,
            out=op.out,
            matrix=self._matrix(op) if op.matrix else NONE,
            vector=self._vector((op.norm,)) if op.norm else bias,
            vector2=self._vector((op.key_norm,)) if op.key_norm else bias2,
            layer=op.layer,
            rope=op.rope,
            window=NONE if op.window is None else op.window,
            activation=ACTIVATION_NUMBERS[op.activation],
            selected=int(op.selected),
            scale=op.scale,
        )
        self._check(self._library.forebay_add_op(self._handle, ctypes.byref(struct)) == 0)

    def add_rope(self, rope: Rope) -> None:
        """Append a rotary embedding; they are numbered in the order of these calls."""
        frequencies = (ctypes.c_double * len(rope.inverse_frequencies))(*rope.inverse_frequencies)
        added = self._library.forebay_add_rope(
            self._handle, frequencies, len(frequencies), rope.amplitude
        )
        self._check(added >= 0)

    def _matrix(self, op: NativeOp) -> int:
        names = op.matrix
        if names not in self._matrices:
            if op.kind == OpKind.EMBED and names not in self._multiplied:
                self._matrices[names] = self._table(names[0])
            else:
                self._matrices[names] = self._pack(names, paired=op.kind == OpKind.GATED_LINEAR)
        return self._matrices[names]

    def _table(self, name: str) -> int:
        table = self._take(name)
        self.tables.append(table)
        index = self._library.forebay_add_table(
            self._handle, table.data_ptr(), table.shape[1] * table.element_size()
        )
        self._check(index >= 0)
        return int(index)

    def _pack(self, names: tuple[str, ...], *, paired: bool) -> int:
        """`paired` deals the panels of two matrices in turns, so that gates meet their ups."""
        rows = [self._weights[name].shape[0] for name in names]
        columns = self._weights[names[0]].shape[1]
        panels = sum(map(_panels, rows)) if paired else _panels(sum(rows))
        index = self._library.forebay_add_matrix(self._handle, panels, columns)
        self._check(index >= 0)
        first_output = 0
        for place, name in enumerate(names):
            source = self._take(name)
            packed = self._library.forebay_pack(
                self._handle, index, source.data_ptr(), source.shape[0], columns,
                0 if paired else first_output, 2 if paired else 1, place if paired else 0,
            )  # fmt: skip
            self._check(packed == 0)
            first_output += source.shape[0]
        return int(index)

    def _biases(self, op: NativeOp) -> tuple[int, int]:
        if not op.biases:
            return NONE, NONE
        if op.kind == OpKind.GATED_LINEAR:
            gate, up = op.biases
            return self._vector((gate,)), self._vector((up,))
        return self._vector(op.biases), NONE

    def _vector(self, names: tuple[str, ...]) -> int:
        if names not in self._vectors:
            parts = [self._weights.pop(name).to(torch.float32) for name in names]
            values = torch.cat(parts).contiguous()
            index = self._library.forebay_add_vector(
                self._handle, values.data_ptr(), values.numel()
            )
            self._check(index >= 0)
            self._vectors[names] = int(index)
        return self._vectors[names]

    def _take(self, name: str) -> torch.Tensor:
        return self._weights.pop(name).to(self._dtype).contiguous()

    def _check(self, done: bool) -> None:
        if not done:
            raise MemoryError(self._library.forebay_error().decode())


def _panels(outputs: int) -> int:
    return -(-outputs // _PANEL)
