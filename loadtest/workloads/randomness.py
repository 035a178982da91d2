"""Randomness by name: equal names give equal tokens, times and choices, in any process.

Tokens are a function of name, block and place alone (a counter through SplitMix64's finalizer:
Steele, Lea and Flood, OOPSLA 2014), so that a block can be made without those before it, and
12,000 tokens take a fifth of a millisecond.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from loadtest.vocabulary import Vocabulary

_Words = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def drawer(name: str) -> random.Random:
    """A generator of its own for everything that is drawn one by one."""
    return random.Random(name)  # Python hashes a string in full


def derived_seed(seed: int, name: str) -> int:
    """A seed for a part of a run, such as one of its tenants."""
    digest: int = xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode())
    return digest


def random_tokens(name: str, count: int, vocabulary: Vocabulary) -> array[int]:
    """So many token ids; fewer of the same name are their beginning."""
    return random_blocks(name, (0,), max(1, count), vocabulary)[:count]


def random_blocks(
    name: str, ids: Sequence[int], block_tokens: int, vocabulary: Vocabulary
) -> array[int]:
    """The token ids of one block after the other; equal ids of one name are equal blocks."""
    key = np.array([xxhash.xxh3_64_intdigest(name.encode())], dtype=np.uint64)
    blocks = _mixed(key + np.asarray(ids, dtype=np.int64).astype(np.uint64) * _GOLDEN)
    places = np.arange(1, block_tokens + 1, dtype=np.uint64) * _GOLDEN
    high = _mixed(blocks[:, None] + places) >> np.uint64(32)
    # the upper half as a fraction of the span: Lemire, "Fast Random Integer Generation in an
    # Interval", 2019, without its rejection, which would matter for spans near 2**32
    within = (high * np.uint64(vocabulary.end - vocabulary.first)) >> np.uint64(32)
    tokens = array("I")
    tokens.frombytes((within + np.uint64(vocabulary.first)).astype(np.uintc).tobytes())
    return tokens


def _mixed(state: _Words) -> _Words:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
