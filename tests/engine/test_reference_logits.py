"""Every family's logits against transformers, on tiny random checkpoints, same weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.attention.reference import reference_attention
from engine.decoder import build_program
from engine.executors.base import Executor, StepBatch
from engine.executors.native import NativeExecutor, NativeUnavailable
from engine.executors.torch_executor import TorchExecutor
from engine.loading import load_model
from tests.engine.checkpoints import FAMILIES, tiny_checkpoint

PROMPT_TOKENS = 75


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reference(checkpoint):
    """Prompt ids and transformers' logits at every position."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, PROMPT_TOKENS), generator=_seeded(7))
    with torch.inference_mode():
        return ids[0].tolist(), model(ids).logits[0].float()


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def open_kind(kind: str, checkpoint) -> Executor:
    model = load_model(checkpoint, name="tiny", dtype=torch.float32)
    program = build_program(model.architecture)
    if kind == "native":
        try:
            return NativeExecutor(
                program,
                model.weights,
                dtype=torch.float32,
                blocks=16,
                block_tokens=16,
                threads=2,
                max_tokens=128,
            )
        except NativeUnavailable as reason:  # no compiler: forebay runs on torch, and so do tests
            pytest.skip(str(reason))
    extra = {"attention": reference_attention} if kind == "torch-reference" else {}
    return TorchExecutor(
        program,
        model.weights,
        device=torch.device("cpu"),
        dtype=torch.float32,
        blocks=16,
        block_tokens=16,
        **extra,
    )


def run_in_chunks(executor: Executor, ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Every position's logits, computed chunk by chunk over shuffled pages."""
    table = np.asarray([[5, 1, 9, 3, 12]], dtype=np.int32)
    rows, done = [], 0
    for size in chunks:
        batch = StepBatch(
            token_ids=np.asarray(ids[done : done + size], dtype=np.int32),
            positions=np.arange(done, done + size, dtype=np.int32),
            query_starts=np.asarray([0, size], dtype=np.int32),
            context_lengths=np.asarray([done + size], dtype=np.int32),
            block_tables=table,
            logit_rows=np.arange(size, dtype=np.int32),
        )
        rows.append(executor.forward(batch).clone())
        done += size
    return torch.cat(rows)


@pytest.mark.parametrize("kind", ["native", "torch", "torch-reference"])
@pytest.mark.parametrize("chunks", [[75], [33, 16, 1, 1, 24]], ids=["whole", "chunked"])
def test_logits_equal_transformers(checkpoint, reference, kind, chunks):
    ids, expected = reference
    executor = open_kind(kind, checkpoint)
    try:
        logits = run_in_chunks(executor, ids, chunks)
    finally:
        executor.close()
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
