"""From the decoder's program to the ops that the kernels run: the same work in fewer passes.

What is fused: a linear with the addition to the residual stream that follows it, gate and up with
their activation, a block's output norm with its addition. What is moved: the selection of logit
rows, to where the last attention is over, because no other row is looked at afterwards. What is
added: one op per rotary embedding that computes the step's angles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.architecture import Activation
from engine.decoder import (
    Add,
    Attend,
    Buffer,
    Embed,
    Gate,
    Linear,
    Norm,
    Op,
    Program,
    RotateAndStore,
    Select,
)
from engine.executors.native_build import NativeUnavailable
from engine.executors.native_library import NativeBuffer, OpKind

_BUFFERS: dict[Buffer, NativeBuffer] = {
    "residual": NativeBuffer.RESIDUAL,
    "normed": NativeBuffer.NORMED,
    "qkv": NativeBuffer.QKV,
    "attended": NativeBuffer.ATTENDED,
    "delta": NativeBuffer.DELTA,
    "gated": NativeBuffer.GATED,
    "final": NativeBuffer.FINAL,
    "logits": NativeBuffer.LOGITS,
}


@dataclass(frozen=True, slots=True)
class NativeOp:
    """One op of the kernels, weights by name. `matrix` names what is computed side by side."""

    kind: OpKind
    src: NativeBuffer = NativeBuffer.RESIDUAL
    out: NativeBuffer = NativeBuffer.RESIDUAL
    matrix: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    norm: str | None = None
    key_norm: str | None = None
    layer: int = 0
    rope: int = 0
    window: int | None = None
    activation: Activation = "silu"
    selected: bool = False
    scale: float = 1.0


def lower(program: Program) -> list[NativeOp]:
    """The kernels' ops for `program`. Raises NativeUnavailable for a sequence they do not know."""
    lowered = [NativeOp(OpKind.ANGLES, rope=rope) for rope in sorted(_ropes(program))]
    ops = tuple(op for op in program.ops if not isinstance(op, Select))
    done = 0
    while done < len(ops):
        op, taken = _lower_next(ops[done : done + 2])
        lowered.append(op)
        done += taken
    return _select_early(lowered)


def _select_early(ops: list[NativeOp]) -> list[NativeOp]:
    """Select logit rows right after the last attention, and let what follows run on them alone."""
    after = max(index for index, op in enumerate(ops) if op.kind == OpKind.ATTEND) + 1
    selected = [replace(op, selected=True) for op in ops[after:]]
    return [*ops[:after], NativeOp(OpKind.SELECT), *selected]


def _ropes(program: Program) -> set[int]:
    return {op.rope for op in program.ops if isinstance(op, RotateAndStore)}


def _lower_next(ops: tuple[Op, ...]) -> tuple[NativeOp, int]:
    """The native op that `ops` begin with, and how many of them it covers."""
    match ops:
        case (Embed(weight=weight, scale=scale), *_):
            return NativeOp(OpKind.EMBED, matrix=(weight,), scale=scale), 1
        case (Norm(src="selected", weight=weight, out="final"), *_):
            return NativeOp(OpKind.NORM, out=NativeBuffer.FINAL, norm=weight), 1
        case (Norm(src="delta", weight=weight, out="delta"), Add(), *_):
            return NativeOp(OpKind.NORM_ADD, src=NativeBuffer.DELTA, norm=weight), 2
        case (Norm(src="residual", weight=weight, out="normed"), *_):
            return NativeOp(OpKind.NORM, out=NativeBuffer.NORMED, norm=weight), 1
        case (Linear(out="gate_up", weights=(_, _)) as linear, Gate(activation=activation), *_):
            return _linear(OpKind.GATED_LINEAR, linear, NativeBuffer.GATED, activation), 2
        case (Linear(out="delta") as linear, Add(), *_):
            return _linear(OpKind.LINEAR_ADD, linear, NativeBuffer.RESIDUAL), 2
        case (Linear(out="delta" | "qkv" | "logits") as linear, *_):
            return _linear(OpKind.LINEAR, linear, _BUFFERS[linear.out]), 1
        case (RotateAndStore() as rotate, *_):
            return NativeOp(
                OpKind.ROTATE_AND_STORE,
                layer=rotate.layer,
                rope=rotate.rope,
                norm=rotate.query_norm,
                key_norm=rotate.key_norm,
            ), 1
        case (Attend() as attend, *_):
            return NativeOp(
                OpKind.ATTEND, layer=attend.layer, window=attend.window, scale=attend.scale
            ), 1
        case _:
            raise NativeUnavailable(f"the kernels do not run this sequence of ops: {ops}")


def _linear(
    kind: OpKind, linear: Linear, out: NativeBuffer, activation: Activation = "silu"
) -> NativeOp:
    return NativeOp(
        kind,
        src=_BUFFERS[linear.src],
        out=out,
        matrix=linear.weights,
        biases=linear.biases,
        activation=activation,
    )
