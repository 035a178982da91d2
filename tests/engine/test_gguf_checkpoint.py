"""GGUF checkpoints: the same decoder and the same numbers as the directory they were made from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.errors import ModelLoadError, UnsupportedArchitectureError
from engine.loading import load_model
from engine.weights.rope import linear_rope, yarn_rope
from tests.engine.checkpoints import CHAT_TEMPLATE, tiny_checkpoint, tiny_gguf

Type = gguf.GGMLQuantizationType
# What a GGUF file of each family can say: no window for Mistral and Qwen2, no scale for Gemma.
CHANGES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "gemma3": {"query_pre_attn_scalar": 16},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def load(path: Path, dtype: torch.dtype = torch.float32):
    return load_model(path, name="tiny", dtype=dtype)


@pytest.mark.parametrize("family", CHANGES)
def test_same_decoder_and_numbers_as_the_directory(family, tmp_path):
    directory = tiny_checkpoint(family, tmp_path, **CHANGES[family])
    ours = load(tiny_gguf(directory, tmp_path / "m.gguf"))
    theirs = load(directory)
    expected = dataclasses.replace(theirs.architecture, family=ours.architecture.family)
    eps = ours.architecture.norm_eps
    assert eps == pytest.approx(expected.norm_eps, rel=1e-6)  # the file stores it in float32
    assert ours.architecture == dataclasses.replace(expected, norm_eps=eps)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, tensor in theirs.weights.items():
        assert torch.equal(ours.weights[name], tensor), name
    assert ours.eos_token_ids == {2}
    assert ours.chat_template == CHAT_TEMPLATE
    text = "the <|im_end|> thing"
    assert ours.tokenizer.encode(text, control_tokens=True) == theirs.tokenizer.encode(
        text, control_tokens=True
    )


@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0, Type.Q5_1, Type.Q4_0], ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantized_matrices_are_close_and_in_the_asked_dtype(llama, tmp_path, kind, dtype):
    ours = load(tiny_gguf(llama, tmp_path / "m.gguf", matrices=kind), dtype)
    theirs = load(llama)
    # 4 bits step by about a seventh of the largest of 32 normal numbers; fewer bits, wider steps
    tolerance = {Type.F16: 1e-3, Type.Q8_0: 5e-3, Type.Q5_1: 0.03, Type.Q4_0: 0.07}[kind]
    for name, tensor in theirs.weights.items():
        found = ours.weights[name]
        assert found.dtype == (torch.float32 if tensor.ndim == 1 else dtype)
        torch.testing.assert_close(found.float(), tensor, atol=tolerance, rtol=0.01)


def test_stored_rope_factors_are_used(llama, tmp_path):
    path = tiny_gguf(llama, tmp_path / "m.gguf")
    factors = np.linspace(1, 4, 8, dtype=np.float32)
    plain = load(path).architecture.ropes[0].inverse_frequencies
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "f.gguf", "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind, inner = field.types[0], field.types[-1]
            writer.add_key_value(key, field.contents(), kind, inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scaled = load(tmp_path / "f.gguf").architecture.ropes[0].inverse_frequencies
    np.testing.assert_allclose(scaled, np.asarray(plain) / factors, rtol=1e-6)


def test_linear_and_yarn_scaling(llama, tmp_path):
    scaling = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    linear = load(tiny_gguf(llama, tmp_path / "l.gguf", **scaling))
    assert linear.architecture.ropes == (linear_rope(10000.0, 16, 4.0),)
    scaling["llama__rope__scaling__type"] = "yarn"
    scaling["llama__rope__scaling__original_context_length"] = 32
    yarn = load(tiny_gguf(llama, tmp_path / "y.gguf", **scaling))
    assert yarn.architecture.ropes == (yarn_rope(10000.0, 16, factor=4.0, original_positions=32),)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama__rope__scaling__type": "longrope"}, "rope scaling longrope"),
        ({"llama__rope__dimension_count": 8}, "rotation of 8 out of 16 dims"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"split__count": 3}, "split into several files"),
        ({"llama__attention__value_length": 8}, "keys and values of different sizes"),
        ({"llama__attention__head_count_kv": [2, 1, 2]}, "head_count_kv differs between layers"),
    ],
)
def test_what_the_decoder_cannot_express_is_refused_by_name(llama, tmp_path, extra, message):
    path = tiny_gguf(llama, tmp_path / "m.gguf", **extra)
    with pytest.raises(UnsupportedArchitectureError, match=message) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}: ")


def test_an_unknown_architecture_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedArchitectureError, match="architecture mamba is not supported"):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama__embedding_length": 32}, r"tensor token_embd\.weight has shape \[272, 64\]"),
        ({"llama__embedding_length": "x"}, r"llama\.embedding_length must be an integer, not 'x'"),
        ({"llama__block_count": 4}, r"needs layers\.3\.attention_norm\.weight, which is missing"),
        ({"llama__block_count": 2}, r"tensor blk\.2\.\w+\.weight has no place"),
        ({"llama__attention__head_count_kv": 3}, "4 query heads cannot share 3 key heads"),
        ({"tokenizer__ggml__tokens": ["a"] * 300}, "token_type for 300 tokens"),
        ({"tokenizer__chat_template": "{% if %}"}, "the chat template is malformed"),
        ({"tokenizer__ggml__pre": "falcon"}, "pre-tokenizer falcon is not supported"),
    ],
)
def test_contradictions_are_one_line_errors(llama, tmp_path, extra, message):
    path = tiny_gguf(llama, tmp_path / "m.gguf", **extra)
    with pytest.raises(ModelLoadError, match=message) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_turn_ends_end_a_sequence_though_the_file_names_another(llama, tmp_path):
    model = load(tiny_gguf(llama, tmp_path / "m.gguf", tokenizer__ggml__eos_token_id=0))
    assert model.eos_token_ids == {0, 2}
