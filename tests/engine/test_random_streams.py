from __future__ import annotations

import numpy as np
import pytest

from engine.sampling.random_streams import stream_key, uniforms


def draws(seed: int, choice: int, count: int) -> np.ndarray:
    keys = np.full(count, stream_key(seed, choice), dtype=np.uint64)
    return uniforms(keys, np.arange(count, dtype=np.uint64))


def test_known_splitmix64_outputs() -> None:
    """The reference implementation's first outputs for the state 1234567."""
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    got = uniforms(np.full(4, 1234567, dtype=np.uint64), np.arange(4, dtype=np.uint64))
    assert got.tolist() == [(output >> 11) * 2.0**-53 for output in outputs]


@pytest.mark.parametrize(
    ("seed", "choice", "key"),
    [
        (0, 0, 0xA706DD2F4D197E6F),
        (0, 1, 0xB382A305F4414F5E),
        (1, 0, 0x5E41AB087439611E),
        (-1, 0, 0x5DC20AA7B2A27137),
        (2**63 + 5, 7, 0x9550FF338A5AEC9B),
    ],
)
def test_keys_never_change(seed: int, choice: int, key: int) -> None:
    assert stream_key(seed, choice) == key


def test_draws_never_change() -> None:
    keys = np.array([stream_key(42, 0), stream_key(42, 1), stream_key(43, 0)], dtype=np.uint64)
    got = uniforms(keys, np.array([0, 17, 2**40], dtype=np.uint64))
    assert got.tolist() == [0.3869742762400409, 0.1804952567941821, 0.8447838102886153]


def test_seeds_count_modulo_two_to_the_64() -> None:
    assert stream_key(-1, 0) == stream_key(2**64 - 1, 0)
    assert stream_key(2**64 + 3, 2) == stream_key(3, 2)


def test_a_draw_does_not_depend_on_the_batch() -> None:
    keys = np.array([stream_key(seed, 0) for seed in range(9)], dtype=np.uint64)
    positions = np.arange(100, 109, dtype=np.uint64)
    together = uniforms(keys, positions)
    alone = [uniforms(keys[i : i + 1], positions[i : i + 1])[0] for i in range(9)]
    assert together.tolist() == alone


@pytest.mark.parametrize("axis", ["position", "choice", "seed"])
def test_uniform_and_independent_along_each_axis(axis: str) -> None:
    count = 50_000
    if axis == "position":
        numbers = draws(7, 0, count)
    elif axis == "choice":
        keys = np.array([stream_key(7, choice) for choice in range(count)], dtype=np.uint64)
        numbers = uniforms(keys, np.zeros(count, dtype=np.uint64))
    else:
        keys = np.array([stream_key(seed, 0) for seed in range(count)], dtype=np.uint64)
        numbers = uniforms(keys, np.zeros(count, dtype=np.uint64))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    cells = 256
    # A chi-square of 255 degrees has mean 255 and deviation 22.6; five deviations either way.
    observed = np.bincount((numbers * cells).astype(int), minlength=cells)
    chi_square = ((observed - count / cells) ** 2 / (count / cells)).sum()
    assert 142 < chi_square < 368
    pairs = (numbers[:-1] * 16).astype(int) * 16 + (numbers[1:] * 16).astype(int)
    expected = (count - 1) / cells
    chi_square = ((np.bincount(pairs, minlength=cells) - expected) ** 2 / expected).sum()
    assert 142 < chi_square < 368


def test_streams_of_neighbouring_choices_and_seeds_are_unrelated() -> None:
    count = 20_000
    base = draws(11, 0, count)
    for other in (draws(11, 1, count), draws(12, 0, count), draws(10, 1, count)):
        for lag in (0, 1, 2):
            correlation = np.corrcoef(base[lag:], other[: count - lag])[0, 1]
            assert abs(correlation) < 5 / np.sqrt(count)
        assert not set(base) & set(other)
