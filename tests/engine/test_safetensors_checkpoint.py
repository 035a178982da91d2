"""Hugging Face directories: every family's config and weights, shards, and what may be missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.decoder import weight_names
from engine.errors import ModelLoadError, UnsupportedArchitectureError
from engine.loading import load_model
from engine.weights.fields import Fields
from engine.weights.hf_architecture import hf_architecture
from engine.weights.shapes import weight_shapes
from tests.engine.checkpoints import CHAT_TEMPLATE, FAMILIES, tiny_checkpoint, tiny_config


def load(path: Path, dtype: torch.dtype = torch.float32):
    return load_model(path, name="tiny", dtype=dtype)


def edit(path: Path, **changes: object) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | changes))


def architecture(config: dict):
    return hf_architecture(Fields(Path("config.json"), config))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def llama(tmp_path) -> Path:
    return tiny_checkpoint("llama", tmp_path)


def test_every_weight_is_there_in_shape_and_value(family, tmp_path):
    model = load(tiny_checkpoint(family, tmp_path))
    arch = model.architecture
    assert model.weights.keys() == weight_names(arch) == weight_shapes(arch).keys()
    raw = load_file(tmp_path / "model.safetensors")
    norm_offset = 1 if family == "gemma3" else 0
    expected = {
        "embed.weight": raw["model.embed_tokens.weight"],
        "final_norm.weight": raw["model.norm.weight"] + norm_offset,
        "layers.1.key.weight": raw["model.layers.1.self_attn.k_proj.weight"],
        "layers.2.down.weight": raw["model.layers.2.mlp.down_proj.weight"],
        "layers.2.attention_norm.weight": raw["model.layers.2.input_layernorm.weight"]
        + norm_offset,
    }
    for name, tensor in expected.items():
        assert torch.equal(model.weights[name], tensor), name
    assert model.chat_template == CHAT_TEMPLATE
    assert model.eos_token_ids == {2}


def test_sixteen_bit_loading_keeps_norms_in_float32(tmp_path):
    directory = tiny_checkpoint("gemma3", tmp_path, dtype=torch.bfloat16)
    half, full = load(directory, torch.bfloat16), load(directory)
    for name, tensor in half.weights.items():
        assert tensor.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
        assert torch.equal(tensor.float(), full.weights[name]), name


def test_shards_are_joined(tmp_path):
    one = load(tiny_checkpoint("qwen3", tmp_path / "one"))
    directory = tiny_checkpoint("qwen3", tmp_path / "many", max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    many = load(directory)
    assert one.weights.keys() == many.weights.keys()
    assert all(torch.equal(one.weights[name], many.weights[name]) for name in one.weights)


def test_old_and_new_config_styles_agree():
    config = tiny_config("gemma3").to_dict()
    config["rope_parameters"]["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    old = {key: value for key, value in config.items() if key != "layer_types"}
    del old["rope_parameters"]
    old |= {
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"type": "linear", "factor": 8.0},
        "architectures": ["Gemma3ForCausalLM"],
    }
    assert architecture(old) == architecture(config | {"architectures": ["Gemma3ForCausalLM"]})

    config = tiny_config("llama3-rope").to_dict() | {"architectures": None}
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    scaling = dict(config["rope_parameters"])
    old |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    assert architecture(old) == architecture(config)


def test_sliding_windows_by_family():
    def windows(family: str, **changes: object) -> list[int | None]:
        config = tiny_config(family).to_dict() | {"architectures": None} | changes
        return [layer.window for layer in architecture(config).layers]

    assert windows("llama") == [None] * 3
    assert windows("llama", sliding_window=8) == [None] * 3
    assert windows("mistral") == [24] * 3
    assert windows("mistral", sliding_window=None) == [None] * 3
    assert windows("qwen2") == [None, 24, 24]
    assert windows("qwen2", layer_types=None, max_window_layers=2) == [None, None, 24]
    assert windows("qwen2", use_sliding_window=False) == [None] * 3
    assert windows("gemma3") == [24] * 5 + [None]


def test_yarn_reaches_beyond_the_original_context():
    config = tiny_config("llama-yarn").to_dict() | {"architectures": None}
    config["max_position_embeddings"] = 32
    assert architecture(config).max_positions == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2 is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights quantized by gptq"),
        ({"hidden_act": "relu"}, "hidden_act relu is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "rope scaling dynamic"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
    ],
)
def test_what_the_decoder_cannot_express_is_refused_by_name(llama, changes, message):
    edit(llama / "config.json", **changes)
    with pytest.raises(UnsupportedArchitectureError, match=message) as raised:
        load(llama)
    assert str(raised.value).startswith(str(llama / "config.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, r"config\.json: hidden_size is missing"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be an integer, not '3'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, not 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a number, not True"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"num_hidden_layers": 4}, r"needs layers\.3\.attention_norm\.weight, which is missing"),
        ({"num_hidden_layers": 2}, r"tensor model\.layers\.2\.\S+ has no place"),
        ({"intermediate_size": 90}, r"has shape \[96, 64\], expected \[90, 64\]"),
        ({"vocab_size": 200}, r"has shape \[272, 64\], expected \[200, 64\]"),
    ],
)
def test_contradictions_are_one_line_errors(llama, changes, message):
    edit(llama / "config.json", **changes)
    with pytest.raises(ModelLoadError, match=message) as raised:
        load(llama)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", r"config\.json: no such file; a model is a Hugging Face directory \("),
        ("tokenizer.json", r"tokenizer\.json: No such file"),
        ("model.safetensors", r"neither model\.safetensors nor model\.safetensors\.index\.json"),
    ],
)
def test_missing_files_are_named(llama, name, message):
    (llama / name).unlink()
    with pytest.raises(ModelLoadError, match=message):
        load(llama)


def test_pickled_weights_are_refused(llama):
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="only pickled weights"):
        load(llama)


def test_a_missing_or_foreign_shard_is_named(tmp_path):
    directory = tiny_checkpoint("llama", tmp_path, max_shard_size="100KB")
    first = sorted(directory.glob("*.safetensors"))[0]
    first.rename(directory / "elsewhere")
    with pytest.raises(ModelLoadError, match=f"{first.name}: missing, though"):
        load(directory)
    edit(directory / "model.safetensors.index.json", weight_map={"a": "../outside.safetensors"})
    with pytest.raises(ModelLoadError, match=r"\.\./outside\.safetensors is not a file name"):
        load(directory)


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, -1])
def test_a_truncated_file_is_named(llama, keep):
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: truncated or not safetensors"):
        load(llama)


def test_an_unsupported_number_type_is_named(llama):
    path = llama / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=r"tensor model\.norm\.weight is stored as I8"):
        load(llama)


def test_derived_and_tied_tensors_are_left_out(tmp_path):
    directory = tiny_checkpoint("qwen2", tmp_path)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    tensors["lm_head.weight"] = torch.zeros(272, 64)
    save_file(tensors, path)
    assert "head.weight" not in load(directory).weights


def test_ends_and_sampling_defaults_come_from_the_generation_config(llama):
    generation = {"eos_token_id": [0, 5], "temperature": 0.6, "top_k": 20, "do_sample": True}
    (llama / "generation_config.json").write_text(json.dumps(generation))
    model = load(llama)
    assert model.eos_token_ids == {0, 2, 5}  # 2 is the tokenizer's own
    assert model.generation_defaults == {"temperature": 0.6, "top_k": 20.0}


def test_sampling_defaults_out_of_range_are_refused(llama):
    (llama / "generation_config.json").write_text(json.dumps({"repetition_penalty": 0}))
    with pytest.raises(ModelLoadError, match="repetition_penalty"):
        load(llama)


def test_templates_in_older_places(llama):
    (llama / "chat_template.jinja").unlink()
    assert load(llama).chat_template is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    edit(llama / "tokenizer_config.json", chat_template=named)
    assert load(llama).chat_template == "d"
    edit(llama / "tokenizer_config.json", chat_template="plain")
    assert load(llama).chat_template == "plain"
    (llama / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load(llama).chat_template == "json"


def test_more_tokens_than_embedding_rows_are_refused(tmp_path):
    directory = tiny_checkpoint("llama", tmp_path, vocab_size=200)
    with pytest.raises(ModelLoadError, match="token id 268 has no row among 200 embeddings"):
        load(directory)


def test_added_tokens_beyond_the_embedding_do_not_exist(llama):
    definition = json.loads((llama / "tokenizer.json").read_text())
    definition["added_tokens"].append({"id": 272, "content": "<image>", "special": True})
    (llama / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load(llama).tokenizer
    assert tokenizer.vocab_size == 269
    assert tokenizer.decode(tokenizer.encode("<image>", control_tokens=True)) == "<image>"
