"""The compiled kernels' C ABI in ctypes: mirrors engine/native/program.h and forebay.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

from engine.executors.native_build import NativeUnavailable, build_library

NONE = -1
"""No such vector, or no window."""

NEVER = 2**31 - 1
"""An op that no program has: a step that may pause after it does not."""

ISA_NUMBERS = {"auto": 0, "portable": 1, "avx512bf16": 2, "amx": 3}
ACTIVATION_NUMBERS = {"silu": 0, "gelu_tanh": 1}


class NativeBuffer(IntEnum):
    """Buffers of a step, numbered as in program.h."""

    RESIDUAL = 0
    NORMED = 1
    QKV = 2
    ATTENDED = 3
    DELTA = 4
    GATED = 5
    FINAL = 6
    LOGITS = 7


class Ending(IntEnum):
    """How a call that runs a step ends, numbered as in program.h."""

    DONE = 0
    FAILED = 1
    PAUSED = 2


class OpKind(IntEnum):
    """What the kernels can run, numbered as in program.h."""

    ANGLES = 0
    EMBED = 1
    NORM = 2
    SELECT = 3
    NORM_ADD = 4
    LINEAR = 5
    LINEAR_ADD = 6
    GATED_LINEAR = 7
    ROTATE_AND_STORE = 8
    ATTEND = 9


class ShapeStruct(ctypes.Structure):
    """`Shape` of program.h."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "dtype", "isa", "threads", "vocab", "hidden", "intermediate", "heads", "kv_heads",
                "head_dim", "layers", "block_tokens", "blocks", "max_tokens",
            )
        ),
        ("norm_eps", c_float),
    )  # fmt: skip


class OpStruct(ctypes.Structure):
    """`Op` of program.h."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "kind", "src", "out", "matrix", "vector", "vector2", "layer", "rope", "window",
                "activation", "selected",
            )
        ),
        ("scale", c_float),
    )  # fmt: skip


class StepStruct(ctypes.Structure):
    """`Step` of program.h."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                "token_ids", "positions", "query_starts", "context_lengths", "block_tables",
                "logit_rows", "pages", "logits", "pause_after",
            )
        ),
        *(
            (name, c_int32)
            for name in (
                "tokens", "sequences", "table_width", "logit_row_count", "share_prefixes",
            )
        ),
    )  # fmt: skip


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "forebay_error": (c_char_p, ()),
    "forebay_isa": (c_int32, (c_int32,)),
    "forebay_create": (c_void_p, (POINTER(ShapeStruct),)),
    "forebay_destroy": (None, (c_void_p,)),
    "forebay_add_matrix": (c_int32, (c_void_p, c_int32, c_int32)),
    "forebay_add_table": (c_int32, (c_void_p, c_void_p, c_int64)),
    "forebay_pack": (c_int32, (c_void_p, c_int32, c_void_p, *(c_int32,) * 5)),
    "forebay_add_vector": (c_int32, (c_void_p, c_void_p, c_int32)),
    "forebay_add_rope": (c_int32, (c_void_p, POINTER(c_double), c_int32, c_float)),
    "forebay_add_op": (c_int32, (c_void_p, POINTER(OpStruct))),
    "forebay_step": (c_int32, (c_void_p, c_int32, POINTER(StepStruct))),
    "forebay_resume": (c_int32, (c_void_p, c_int32)),
    "forebay_profile": (None, (c_void_p, c_int32, POINTER(c_int64))),
    "forebay_read": (c_int64, (c_void_p, c_void_p, c_int64)),
}


def open_library(say: Callable[[str], None]) -> ctypes.CDLL:
    """Compile if need be, and load once per process. Raises NativeUnavailable.

    Calls release the GIL. They are not thread-safe per handle.
    """
    return _load(build_library(say))


@cache
def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as problem:
        raise NativeUnavailable(f"{path} does not load: {problem}; delete it") from problem
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
