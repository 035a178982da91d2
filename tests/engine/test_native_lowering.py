"""The native op list: what is fused, what is moved, what is refused."""

from __future__ import annotations

import pytest

from engine.decoder import Gate, Program, build_program
from engine.executors.native_build import NativeUnavailable
from engine.executors.native_library import NativeBuffer, OpKind
from engine.executors.native_lowering import lower
from tests.engine.native_models import ARCHITECTURES, architecture

ATTENTION = [OpKind.NORM, OpKind.LINEAR, OpKind.ROTATE_AND_STORE, OpKind.ATTEND]
REST = [OpKind.LINEAR_ADD, OpKind.NORM, OpKind.GATED_LINEAR, OpKind.LINEAR_ADD]


def test_a_plain_decoder():
    ops = lower(build_program(architecture()))
    assert [op.kind for op in ops] == [
        OpKind.ANGLES, OpKind.EMBED, *ATTENTION, *REST, *ATTENTION,
        OpKind.SELECT, *REST, OpKind.NORM, OpKind.LINEAR,
    ]  # fmt: skip


def test_only_logit_rows_after_the_last_attention():
    ops = lower(build_program(architecture()))
    select = [op.kind for op in ops].index(OpKind.SELECT)
    assert not any(op.selected for op in ops[: select + 1])
    assert all(op.selected for op in ops[select + 1 :])
    assert ops[-1].out == NativeBuffer.LOGITS


def test_output_norms_join_the_addition():
    kinds = [op.kind for op in lower(build_program(ARCHITECTURES["gemma_like"]))]
    assert kinds.count(OpKind.NORM_ADD) == 2 * 3
    assert kinds.count(OpKind.ANGLES) == 2
    assert OpKind.LINEAR_ADD not in kinds


def test_an_unknown_sequence_is_refused():
    program = build_program(architecture())
    ops = tuple(op for op in program.ops if not isinstance(op, Gate))
    with pytest.raises(NativeUnavailable, match="gate_up"):
        lower(Program(program.architecture, ops))
