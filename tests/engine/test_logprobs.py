from __future__ import annotations

import pytest
import torch

from engine.errors import BadLogits
from engine.sampling.logprobs import RawLogprobs, prompt_logprobs


def logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("vocab", [5, 1003, 49157])
@pytest.mark.parametrize("top", [0, 1, 5])
def test_prompt_logprobs_against_log_softmax(vocab: int, top: int) -> None:
    values = logits(7, vocab)
    before = values.clone()
    targets = torch.arange(7, dtype=torch.int32) % vocab
    reports = prompt_logprobs(values, targets, top)
    assert torch.equal(values, before)
    reference = torch.log_softmax(before.double(), dim=1)
    best = reference.topk(top, dim=1)
    for i, report in enumerate(reports):
        assert report.token_id == int(targets[i])
        assert report.logprob == pytest.approx(reference[i, report.token_id].item(), abs=1e-5)
        assert [token for token, _ in report.top] == best.indices[i].tolist()
        expected = pytest.approx(best.values[i].tolist(), abs=1e-5)
        assert [logprob for _, logprob in report.top] == expected


def test_rows_may_ask_for_different_numbers() -> None:
    values = logits(4, 100)
    reports = RawLogprobs(values, values.amax(1), [0, 20, 3, 1]).chosen(torch.tensor([1, 2, 3, 4]))
    assert [len(report.top) for report in reports] == [0, 20, 3, 1]


def test_equal_logits_rank_by_token_id() -> None:
    values = torch.zeros(1, 200)
    values[0, 150] = 1.0
    (report,) = prompt_logprobs(values, torch.tensor([199]), 4)
    assert [token for token, _ in report.top] == [150, 0, 1, 2]
    assert report.logprob == report.top[1][1]


def test_impossible_tokens_are_not_alternatives() -> None:
    values = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]])
    (report,) = prompt_logprobs(values, torch.tensor([0]), 4)
    assert [token for token, _ in report.top] == [2, 0]


def test_more_alternatives_than_tokens() -> None:
    (report,) = prompt_logprobs(torch.tensor([[0.0, 1.0]]), torch.tensor([0]), 20)
    assert [token for token, _ in report.top] == [1, 0]


def test_the_first_bad_row_is_named() -> None:
    values = logits(9, 49152)
    values[6, 3] = torch.nan
    values[8, 3] = torch.inf
    with pytest.raises(BadLogits) as caught:
        prompt_logprobs(values, torch.zeros(9, dtype=torch.int64), 2)
    assert caught.value.row == 6


def test_no_rows() -> None:
    assert prompt_logprobs(torch.zeros(0, 10), torch.zeros(0, dtype=torch.int64), 3) == []
