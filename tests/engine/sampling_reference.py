"""Sampling as its documentation says it, one row at a time, in plain Python and exact integers."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch

from engine.sampling.random_streams import stream_key, uniforms
from engine.sampling_params import SamplingParams


def uniform(params: SamplingParams, position: int) -> float:
    key = np.array([stream_key(params.seed, params.choice_index)], dtype=np.uint64)
    return float(uniforms(key, np.array([position], dtype=np.uint64))[0])


def edited(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> np.ndarray:
    """Float32 logits after biases and penalties, one token after another."""
    result = logits.astype(np.float32).copy()
    for token, bias in params.logit_bias.items():
        result[token] += np.float32(bias)
    for token in set(generated) | (set(prompt) if params.repetition_penalty != 1.0 else set()):
        factor = np.float32(params.repetition_penalty)
        value = result[token]
        value = value / factor if value > 0 else value * factor
        count = list(generated).count(token)
        value = value - np.float32(params.frequency_penalty) * np.float32(count)
        result[token] = value - np.float32(params.presence_penalty) * np.float32(count > 0)
    return result


def grid_weights(logits: np.ndarray, temperature: float) -> list[int]:
    """Weights as whole multiples of the grid's step."""
    vocab = len(logits)
    scaled = (logits - logits.max()) / np.float32(temperature)
    steps = 2.0 ** (53 - vocab.bit_length())
    exponentials = torch.from_numpy(scaled).exp().double().numpy()
    return [int(weight) for weight in np.rint(exponentials * steps)]


def kept_tokens(logits: np.ndarray, params: SamplingParams) -> list[int]:
    """What top_k, top_p and min_p leave, best first."""
    weights = grid_weights(logits, params.temperature)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    if params.top_p < 1.0:
        total = sum(weights[token] for token in ranked)
        reached, kept = 0, []
        for token in ranked:
            kept.append(token)
            reached += weights[token]
            if reached >= Fraction(params.top_p) * total:
                break
        ranked = kept
    least = Fraction(params.min_p) * max(weights)
    return [token for token in ranked if weights[token] >= least] or ranked[:1]


def choose(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> int:
    """The token that the sampler must choose."""
    changed = edited(logits, params, prompt, generated)
    if params.greedy:
        return int(changed.argmax())
    weights = grid_weights(changed, params.temperature)
    kept = sorted(kept_tokens(changed, params))
    target = Fraction(uniform(params, len(prompt) + len(generated)))
    target *= sum(weights[token] for token in kept)
    reached = 0
    for token in kept:
        reached += weights[token]
        if reached > target:
            return token
    raise AssertionError("a uniform number below 1 always finds a token")
