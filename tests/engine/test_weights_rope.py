"""Rotary frequencies against the reference's own, to the last bit."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.weights.rope import factored_rope, linear_rope, llama3_rope, plain_rope, yarn_rope


def reference(rope_parameters: dict) -> tuple[list[float], float]:
    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=8,
        max_position_embeddings=131072,
        rope_parameters=rope_parameters,
    )
    init = ROPE_INIT_FUNCTIONS[rope_parameters["rope_type"]]
    frequencies, amplitude = init(config, torch.device("cpu"))
    return frequencies.tolist(), amplitude


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_linear(factor):
    rope = linear_rope(10000.0, 64, factor)
    theirs = reference({"rope_type": "linear", "rope_theta": 10000.0, "factor": factor})
    assert (list(rope.inverse_frequencies), rope.amplitude) == theirs


@pytest.mark.parametrize("original", [32, 8192])
def test_llama3(original):
    rope = llama3_rope(
        500000.0,
        64,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_positions=original,
    )
    theirs = reference(
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
    )
    assert (list(rope.inverse_frequencies), rope.amplitude) == theirs


@pytest.mark.parametrize("options", [{}, {"attention_factor": 1.5}, {"beta_fast": 16.0}])
@pytest.mark.parametrize("truncate", [True, False])
def test_yarn(options, truncate):
    rope = yarn_rope(
        1000000.0, 64, factor=4.0, original_positions=32768, truncate=truncate, **options
    )
    theirs = reference(
        {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "truncate": truncate,
        }
        | options
    )
    assert (list(rope.inverse_frequencies), rope.amplitude) == theirs


def test_stored_factors_divide():
    factors = torch.linspace(1, 8, 32)
    plain = torch.tensor(plain_rope(10000.0, 64).inverse_frequencies)
    stored = torch.tensor(factored_rope(10000.0, 64, factors).inverse_frequencies)
    torch.testing.assert_close(stored, plain / factors)
