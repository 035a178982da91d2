from __future__ import annotations

import pytest
import torch

from engine.sampling.grid_softmax import grid_weights, row_chunks, weight_totals


def logits(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 4


@pytest.mark.parametrize("vocab", [2, 1000, 49152, 262144])
def test_sums_are_exact_in_any_order(vocab: int) -> None:
    values = logits(2, vocab)
    values[1] = 0.0  # the greatest sum there can be
    ones = torch.ones(2)
    weights = grid_weights(values, values.amax(1), ones, vocab)
    step = 2.0 ** (53 - vocab.bit_length())
    for row in weights:
        whole = [int(weight * step) for weight in row.tolist()]
        assert [number / step for number in whole] == row.tolist()
        exact = sum(whole) / step
        shuffled = row[torch.randperm(vocab, generator=torch.Generator().manual_seed(1))]
        assert row.sum().item() == exact
        assert shuffled.cumsum(0)[-1].item() == exact
        assert row.flip(0).cumsum(0)[-1].item() == exact
    assert weight_totals(values, values.amax(1), ones).tolist() == weights.sum(1).tolist()


def test_weights_are_softmax_to_float32_precision() -> None:
    values = logits(3, 49152)
    temperatures = torch.tensor([0.5, 1.0, 2.0])
    weights = grid_weights(values, values.amax(1), temperatures, 49152)
    ours = weights / weights.sum(1, keepdim=True)
    expected = torch.softmax(values.double() / temperatures.double().unsqueeze(1), dim=1)
    assert (ours - expected).abs().max().item() < 1e-6


@pytest.mark.parametrize("vocab", [37, 1003, 49157])
def test_a_weight_does_not_depend_on_its_place(vocab: int) -> None:
    values = logits(1, vocab)
    maxima, ones = values.amax(1), torch.ones(1)
    whole = grid_weights(values, maxima, ones, vocab)
    for start in (0, 1, 3, 7, 30):
        part = grid_weights(values[:, start : start + 29].contiguous(), maxima, ones, vocab)
        assert torch.equal(part, whole[:, start : start + 29])


def test_chunks_cover_the_rows_once() -> None:
    slices = row_chunks(11, 49152, torch.device("cpu"))
    assert [i for chunk in slices for i in range(chunk.start, chunk.stop)] == list(range(11))
    assert row_chunks(0, 10, torch.device("cpu")) == []


def test_threads_do_not_change_a_total() -> None:
    values = logits(5, 49157)
    maxima, ones = values.amax(1), torch.ones(5)
    before = torch.get_num_threads()
    totals = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            totals.append(weight_totals(values, maxima, ones).tolist())
    finally:
        torch.set_num_threads(before)
    assert totals[0] == totals[1]
