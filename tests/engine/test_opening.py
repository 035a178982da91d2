"""Opening an executor: what does not fit is said in one line that names the setting."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ModelLoadError
from engine.loading import load_model
from engine.opening import ExecutorOptions, open_executor
from tests.engine.checkpoints import tiny_checkpoint


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the native executor and torch's
@pytest.mark.parametrize(
    ("pool_bytes", "message"),
    [
        (1, r"cache\.device of 1 bytes is smaller than one block"),
        (1 << 50, r"cache\.device of 1125899906842624 bytes is more than the \d+ bytes of memory"),
        (1 << 80, r"cache\.device of \d+ bytes is more than the \d+ bytes of memory"),
    ],
)
def test_a_pool_that_cannot_be_had_is_refused(tmp_path, dtype, pool_bytes, message):
    model = load_model(tiny_checkpoint("llama", tmp_path / "m"), name="m", dtype=dtype)
    options = ExecutorOptions(torch.device("cpu"), dtype, pool_bytes=pool_bytes, threads=1)
    with pytest.raises(ModelLoadError, match=message):
        open_executor(model.architecture, model.weights, options)


def test_without_the_kernels_torch_runs_and_the_log_says_why(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FOREBAY_NATIVE", "off")
    model = load_model(tiny_checkpoint("llama", tmp_path / "m"), name="m", dtype=torch.float32)
    options = ExecutorOptions(torch.device("cpu"), torch.float32, pool_bytes=1 << 20, threads=1)
    executor = open_executor(model.architecture, model.weights, options)
    assert executor.name == "torch"
    assert "FOREBAY_NATIVE" in caplog.text
    executor.close()
