from __future__ import annotations

import pytest
import torch

from engine.sampling.candidates import (
    _at_least_cpu,
    _at_least_device,
    at_least,
    descending,
    rank_floors,
)


def logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return (values * 8).round() / 8  # coarse, so that values repeat


@pytest.mark.parametrize("vocab", [3, 31, 32, 100, 1000])
@pytest.mark.parametrize("rank", [1, 2, 5, 31, 40])
def test_enough_tokens_reach_a_rank_floor(vocab: int, rank: int) -> None:
    values = logits(6, vocab)
    floors = rank_floors(values, [rank] * 6)
    reaching = (values >= floors.unsqueeze(1)).sum(1)
    assert bool((reaching >= min(rank, vocab)).all())


def test_a_rank_floor_leaves_few_tokens() -> None:
    values = torch.randn(4, 49152, generator=torch.Generator().manual_seed(1))
    reaching = (values >= rank_floors(values, [20, 20, 1, 1]).unsqueeze(1)).sum(1).tolist()
    assert reaching[2:] == [1, 1]
    assert max(reaching) < 40


def test_candidates_are_in_id_order_and_padded() -> None:
    values = torch.tensor([[1.0, 5.0, 3.0, 5.0], [9.0, -1.0, 0.0, 2.0]])
    found = at_least(values, torch.tensor([3.0, 9.0]))
    assert found.token_ids.tolist() == [[1, 2, 3], [0, 0, 0]]
    assert found.logits.tolist() == [[5.0, 3.0, 5.0], [9.0, -torch.inf, -torch.inf]]


def test_banned_tokens_are_no_candidates() -> None:
    values = torch.tensor([[-torch.inf, 1.0, -torch.inf]])
    found = at_least(values, torch.tensor([-torch.inf]))
    assert found.token_ids.tolist() == [[1]]


@pytest.mark.parametrize("floor", [-torch.inf, -2.0, 0.0, 6.0, 99.0])
def test_both_paths_find_the_same(floor: float) -> None:
    values = logits(5, 333)
    floors = torch.full((5,), floor).clamp(min=torch.finfo(torch.float32).min)
    on_cpu, on_device = _at_least_cpu(values, floors), _at_least_device(values, floors)
    assert torch.equal(on_cpu.token_ids, on_device.token_ids)
    assert torch.equal(on_cpu.logits, on_device.logits)


def test_descending_leaves_its_argument_alone() -> None:
    values = logits(3, 50)
    before = values.clone()
    assert torch.equal(descending(values), before.sort(dim=1, descending=True).values)
    assert torch.equal(values, before)
