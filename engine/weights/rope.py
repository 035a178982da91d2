"""Rotary frequencies: base and scaling rule in, numbers out.

The arithmetic runs in float32 in the order that the reference implementation uses, so that the
frequencies agree with it to the last bit. Rules: linear (position interpolation), llama3 (Llama
3.1's three bands), yarn (arXiv 2309.00071), and stored per-frequency factors (GGUF's `rope_freqs`).
"""

from __future__ import annotations

import math

import torch

from engine.architecture import Rope


def plain_rope(theta: float, rotary_dims: int) -> Rope:
    """No scaling: theta^(-2i/d)."""
    return _rope(_frequencies(theta, rotary_dims))


def linear_rope(theta: float, rotary_dims: int, factor: float) -> Rope:
    """Every position divided by `factor`."""
    return _rope(_frequencies(theta, rotary_dims) / factor)


def factored_rope(theta: float, rotary_dims: int, factors: torch.Tensor) -> Rope:
    """Each frequency divided by its own stored factor; `factors` float32 [rotary_dims / 2]."""
    return _rope(_frequencies(theta, rotary_dims) / factors)


def llama3_rope(
    theta: float,
    rotary_dims: int,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_positions: int,
) -> Rope:
    """Short wavelengths kept, long ones divided by `factor`, those between blended."""
    plain = _frequencies(theta, rotary_dims)
    wavelengths = 2 * math.pi / plain
    low, high = original_positions / low_freq_factor, original_positions / high_freq_factor
    scaled = torch.where(wavelengths > low, plain / factor, plain)
    blend = (original_positions / wavelengths - low_freq_factor) / (
        high_freq_factor - low_freq_factor
    )
    blended = (1 - blend) * scaled / factor + blend * scaled
    between = (wavelengths >= high) & (wavelengths <= low)
    return _rope(torch.where(between, blended, scaled))


def yarn_rope(
    theta: float,
    rotary_dims: int,
    *,
    factor: float,
    original_positions: int,
    attention_factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Rope:
    """Fast-turning dims kept, slow ones interpolated by `factor`, a ramp between.

    `attention_factor` None is the paper's 0.1 ln(factor) + 1.
    """
    if attention_factor is None:
        attention_factor = yarn_mscale(factor)

    def dimension_of(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context."""
        turns = math.log(original_positions / (rotations * 2 * math.pi))
        return rotary_dims * turns / (2 * math.log(theta))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dims - 1)
    width = high - low if high != low else 0.001  # a step, but without dividing by zero
    ramp = (torch.arange(rotary_dims // 2, dtype=torch.float32) - low) / width
    keep = 1 - torch.clamp(ramp, 0, 1)
    powers = _powers(theta, rotary_dims)
    return _rope(1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep, attention_factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Yarn's attention temperature for a context `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _powers(theta: float, rotary_dims: int) -> torch.Tensor:
    exponents = torch.arange(0, rotary_dims, 2, dtype=torch.int64).float() / rotary_dims
    result: torch.Tensor = theta**exponents
    return result


def _frequencies(theta: float, rotary_dims: int) -> torch.Tensor:
    return 1.0 / _powers(theta, rotary_dims)


def _rope(frequencies: torch.Tensor, amplitude: float = 1.0) -> Rope:
    return Rope(tuple(frequencies.tolist()), amplitude)
