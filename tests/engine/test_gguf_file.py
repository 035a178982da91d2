"""GGUF headers: what is written comes back, what is broken is one clear error."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelLoadError
from engine.weights.gguf_file import GgufFile
from engine.weights.gguf_tensors import check_storage_types, read_rows

Type = gguf.GGMLQuantizationType
QUANTIZED_HERE = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
K_QUANTS = [Type.Q4_K, Type.Q5_K, Type.Q6_K]


@pytest.fixture
def small_file(tmp_path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.ratio", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "h\u00e9llo")
    writer.add_array("a.words", ["x", "", "\u4e16"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_tensor("matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("vector", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_everything_written_comes_back(small_file):
    with GgufFile(small_file) as file:
        assert file.metadata["a.count"] == 7
        assert file.metadata["a.ratio"] == 0.5
        assert file.metadata["a.flag"] is True
        assert file.metadata["a.text"] == "h\u00e9llo"
        assert file.metadata["a.words"] == ["x", "", "\u4e16"]
        assert file.metadata["a.numbers"] == [1, -2, 3]
        matrix, vector = file.tensors["matrix"], file.tensors["vector"]
        assert (matrix.shape, matrix.rows, matrix.nbytes) == ((3, 4), 3, 48)
        assert read_rows(file, matrix, 1, 3).tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
        assert read_rows(file, vector, 0, 1).tolist() == [[0, 1, 2, 3, 4]]


def test_the_file_is_closed_on_leaving_and_on_failure(small_file, tmp_path):
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with GgufFile(small_file):
        pass
    (tmp_path / "broken.gguf").write_bytes(small_file.read_bytes()[:60])
    with pytest.raises(ModelLoadError):
        GgufFile(tmp_path / "broken.gguf")
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


def test_any_truncation_is_one_line_that_names_the_file(small_file, tmp_path):
    whole = small_file.read_bytes()
    end_of_data = whole.rstrip(b"\0")
    path = tmp_path / "cut.gguf"
    for size in [*range(0, len(end_of_data) - 1, 3)]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf: ") as raised:
            GgufFile(path)
        assert "\n" not in str(raised.value)


def test_a_cut_tensor_is_named_with_the_bytes_it_lacks(small_file, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(small_file.read_bytes()[:-40])
    with pytest.raises(ModelLoadError, match=r"truncated: tensor \w+ ends at byte \d+, the file"):
        GgufFile(path)


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 400), value=st.integers(0, 255))
def test_a_corrupt_header_never_fails_any_other_way(tmp_path_factory, position, value):
    path = tmp_path_factory.mktemp("corrupt") / "c.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("a.words", ["x", "yy"])
    writer.add_tensor("matrix", np.zeros((2, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = bytearray(path.read_bytes())
    data[position % len(data)] = value
    path.write_bytes(data)
    try:
        with GgufFile(path) as file:
            check_storage_types(file)
    except ModelLoadError as error:
        reason = str(error)
        assert reason.startswith(str(path))  # both outcomes are allowed


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes is too short"),
        (b"PK\3\4" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version 50331648 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + b"\xff" * 8, "truncated inside the header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + b"\x63\0\0\0", "unknown type 99"),
    ],
)
def test_what_is_no_gguf_file_is_refused(tmp_path, data, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=message):
        GgufFile(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"absent\.gguf: No such file"):
        GgufFile(tmp_path / "absent.gguf")


def one_tensor(path: Path, data: np.ndarray, kind: Type) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "kind", [*QUANTIZED_HERE, *K_QUANTS, Type.BF16], ids=lambda kind: kind.name
)
def test_stored_numbers_come_back(tmp_path, kind):
    rng = np.random.default_rng(3)
    if kind in K_QUANTS:  # nothing quantizes to these in Python: any bits are some numbers
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        stored = rng.integers(0, 120, (6, 2 * block_bytes), dtype=np.uint8)
    else:
        stored = gguf.quantize(rng.standard_normal((6, 512)).astype(np.float32), kind)
    with GgufFile(one_tensor(tmp_path / "q.gguf", stored, kind)) as file:
        check_storage_types(file)
        tensor = file.tensors["t"]
        assert tensor.shape == (6, 512)
        rows = torch.cat([read_rows(file, tensor, 0, 4), read_rows(file, tensor, 4, 6)]).float()
    assert torch.equal(rows, torch.from_numpy(gguf.dequantize(stored, kind)))


def test_q4_k_and_q6_k_by_hand(tmp_path):
    """One block each, by the format's description: all scales one, values 0..15 and 0..63 - 32."""
    half = np.array([0.5], dtype=np.float16).view(np.uint8)
    scales = np.array([1] * 4 + [0] * 4 + [1] * 4, dtype=np.uint8)  # eight scales 1, minima 0
    q4 = np.concatenate([half, half, scales, np.full(128, 0x21, dtype=np.uint8)])
    with GgufFile(one_tensor(tmp_path / "q4.gguf", q4[None], Type.Q4_K)) as file:
        rows = read_rows(file, file.tensors["t"], 0, 1)[0].tolist()
    assert rows == ([0.5] * 32 + [1.0] * 32) * 4
    q6 = np.concatenate(
        [
            np.full(128, 0x21, dtype=np.uint8),
            np.zeros(64, dtype=np.uint8),
            np.ones(16, dtype=np.uint8),
            half,
        ]
    )
    with GgufFile(one_tensor(tmp_path / "q6.gguf", q6[None], Type.Q6_K)) as file:
        rows = read_rows(file, file.tensors["t"], 0, 1)[0].tolist()
    assert rows == ([0.5 * (1 - 32)] * 64 + [0.5 * (2 - 32)] * 64) * 2


def test_an_unsupported_storage_type_is_named(tmp_path):
    stored = np.zeros((2, gguf.GGML_QUANT_SIZES[Type.IQ4_XS][1]), dtype=np.uint8)
    path = one_tensor(tmp_path / "i.gguf", stored, Type.IQ4_XS)
    message = "tensor t is stored as IQ4_XS; supported are F32"
    with GgufFile(path) as file, pytest.raises(ModelLoadError, match=message):
        check_storage_types(file)
