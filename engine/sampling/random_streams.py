"""Random numbers as a pure function of (seed, choice, position): nothing to save, nothing to share.

Each choice of each request has a 64-bit stream key; the draw at a position is SplitMix64's output
for that key and counter (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014). No state means that a draw cannot depend on batch mates, on how often a sequence was
preempted, or on which replica goes on with it. Changing anything here changes the text of every
seeded request, so the tests pin values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def stream_key(seed: int, choice_index: int) -> int:
    """The 64-bit key of one choice's stream. Any integer is a seed; it counts modulo 2**64.

    The seed is mixed before the choice joins it, so that (seed, choice + 1) and (seed + 1, choice)
    have nothing in common.
    """
    return _mix((_mix((seed + _GOLDEN) & _MASK) + (choice_index + 1) * _GOLDEN) & _MASK)


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) per (key, position), uint64 [n] each: float64 [n], multiples of 2**-53.

    `keys` come from `stream_key`; positions count tokens from the start of the sequence.
    """
    z = keys + (positions + np.uint64(1)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    z ^= z >> np.uint64(31)
    numbers: NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)
