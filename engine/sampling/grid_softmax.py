"""Softmax weights whose sums do not depend on the order of addition.

A floating-point sum depends on how it is split over vector lanes, threads and thread blocks, and a
sampled token would then depend, once in a while, on the rest of its batch. Weights here are float64
multiples of one power of two, small enough that every sum over a vocabulary is exact. So totals and
running sums of a row are the same numbers in any order, for any subset, on any device.
"""

from __future__ import annotations

import torch

# Scratch per pass: about a core's L2 on a CPU, and no more than half a GiB on an accelerator.
_CPU_CHUNK_ELEMENTS = 1 << 17
_DEVICE_CHUNK_ELEMENTS = 1 << 25


def grid_weights(
    logits: torch.Tensor, maxima: torch.Tensor, temperatures: torch.Tensor, vocab: int
) -> torch.Tensor:
    """exp((logit - maximum) / temperature), unnormalised, rounded to the grid of `vocab`.

    logits float32 [n, m], maxima and temperatures float32 [n] (a maximum is finite and bounds its
    row, a temperature is positive); float64 [n, m] in [0, 1], exactly 1 at the maximum. Each weight
    is a function of its own logit alone. Rounding moves a weight by at most vocab / 2**54, so what
    is lost in all is of the order of float32's own rounding.
    """
    # The maximum goes first, so a tiny temperature can only drive weights to 0, never to infinity.
    scaled = logits - maxima.unsqueeze(1)
    weights = scaled.div_(temperatures.unsqueeze(1)).exp_().double()
    # Added to 2**b, a number below 2**b keeps its multiples of 2**(b - 52) and rounds the rest
    # away. With vocab < 2**(b + 1), no sum of weights can then need more than 53 bits.
    shift = float(1 << (vocab.bit_length() - 1))
    return weights.add_(shift).sub_(shift)


def weight_totals(
    logits: torch.Tensor, maxima: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """The sum of each row's `grid_weights`: logits float32 [n, vocab] to float64 [n]."""
    rows, vocab = logits.shape
    totals = torch.empty(rows, dtype=torch.float64, device=logits.device)
    for chunk in row_chunks(rows, vocab, logits.device):
        weights = grid_weights(logits[chunk], maxima[chunk], temperatures[chunk], vocab)
        torch.sum(weights, dim=1, out=totals[chunk])
    return totals


def row_chunks(rows: int, vocab: int, device: torch.device) -> list[slice]:
    """Slices of rows whose float64 weights fit the scratch that one pass should use."""
    elements = _CPU_CHUNK_ELEMENTS if device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    step = max(1, elements // vocab)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
