"""Numbers out of a GGUF file: any supported storage type, a few rows at a time."""

from __future__ import annotations

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from engine.errors import ModelLoadError
from engine.weights.gguf_file import GgufFile, GgufTensor

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_QUANTIZED = {
    GGMLQuantizationType.Q4_0: quants.Q4_0,
    GGMLQuantizationType.Q4_1: quants.Q4_1,
    GGMLQuantizationType.Q5_0: quants.Q5_0,
    GGMLQuantizationType.Q5_1: quants.Q5_1,
    GGMLQuantizationType.Q8_0: quants.Q8_0,
    GGMLQuantizationType.Q4_K: quants.Q4_K,
    GGMLQuantizationType.Q5_K: quants.Q5_K,
    GGMLQuantizationType.Q6_K: quants.Q6_K,
}


def check_storage_types(file: GgufFile) -> None:
    """Raise ModelLoadError, naming tensor and type, if any tensor cannot be read."""
    for tensor in file.tensors.values():
        if tensor.type not in _PLAIN and tensor.type not in _QUANTIZED:
            names = ", ".join(kind.name for kind in (*_PLAIN, *_QUANTIZED))
            raise ModelLoadError(
                f"{file.path}: tensor {tensor.name} is stored as {tensor.type.name}; "
                f"supported are {names}"
            )


def read_rows(file: GgufFile, tensor: GgufTensor, start: int, stop: int) -> torch.Tensor:
    """Rows [start, stop) of a tensor: [stop - start, row elements].

    Plain types come in their own dtype, quantized ones in float32. Safe from several threads.
    """
    raw = file.read_rows(tensor, start, stop)
    if tensor.type in _PLAIN:
        return torch.frombuffer(raw, dtype=_PLAIN[tensor.type]).view(stop - start, -1)
    stored = np.frombuffer(raw, dtype=np.uint8).reshape(stop - start, tensor.row_bytes)
    return torch.from_numpy(_QUANTIZED[tensor.type].dequantize_rows(stored))
